"""
Two processes give the losses of one (make test-long; some minutes, most of them of compiling): DDP
and FSDP2, compiled, in float32 and by autocast to bfloat16. doc/lab/gpu.md shows the printed lines.
"""
import pytest

from tests.test_train import folder, losses, run  # noqa: F401 (a fixture)

COMPILED, SHARDED = "--compile=True", "--fsdp=True"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def alone(request, folder):  # noqa: F811
    """Return (folder, dtype, settings) of a run of one process without compilation."""
    args = ["--data=my.txt", "--max_iters=60", "--batch_size=4", "--gradient_accumulation_steps=2",
            "--warmup_iters=10", "--dim=64", f"--dtype={request.param}"]
    done = run(folder, *args, f"--out_dir={request.param}")
    assert done.returncode == 0, done.stderr
    return folder, request.param, args


@pytest.mark.parametrize("name, more", [
    ("DDP, compiled", [COMPILED]), ("FSDP2", [SHARDED]), ("FSDP2, compiled", [SHARDED, COMPILED])])
def test_two_processes_give_the_curve_of_one(alone, name, more):
    where, dtype, args = alone
    out = f"{dtype} {name}"
    done = run(where, *args, *more, f"--out_dir={out}", torchrun=2)
    assert done.returncode == 0, done.stderr
    one, two = losses(where, dtype), losses(where, out)
    assert one.keys() == two.keys() and len(one) > 10
    apart = [abs(a - b) / a for step in one
             for a, b in zip(one[step][:3], two[step][:3]) if a is not None]
    print(f"{name}, {dtype}: {len(apart)} losses, at most {max(apart):.1e} apart; "
          f"from {one[5][0]:.3f} to {one[60][0]:.3f}")
    assert max(apart) <= (1e-5 if dtype == "float32" else 5e-3)
