"""
Read 2,000 mutants of each file format that Python reads: no traceback, no hang, no crash, and less
than 2 GB of memory (part of make test-long).
"""
import os
import time

import pytest

from tests.mutated_files import FORMATS, MEMORY, mutate

COUNT = int(os.environ.get("MUTANTS", "2000"))


@pytest.mark.parametrize("name", FORMATS)
def test_mutants_are_read_or_end_in_one_line(name, tmp_path):
    begun = time.monotonic()
    wrong, refused, most = mutate(name, tmp_path / "m", range(COUNT))
    print(f"\n{name}: {COUNT:,} mutants, {refused:,} refused, {len(wrong)} wrong, {most:,} MB, "
          f"{time.monotonic() - begun:.0f} s")
    assert not wrong, f"{len(wrong)} wrong, the first of them:\n" + "\n".join(wrong[:5])
    assert most < MEMORY
