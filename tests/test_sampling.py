"""The sampler compared with a plain Python loop and with transformers' logits processors.

Covers candidates, probabilities, draws, wrong settings, and when the bytes of a text are released.
"""
import math
import random
import re
import struct
import subprocess
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from transformers import generation

from tests.conftest import LIBRARY, SANITIZE, compile_c
from tests.test_run import Model

MARGIN = 1e-4  # skip cases in which rounding could move a token across a threshold


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compile_c(
        tmp_path_factory.mktemp("sampling") / "sampling", *SANITIZE, "tests/sampling.c", *LIBRARY)


@dataclass
class Case:
    logits: list
    tokens: list = field(default_factory=list)
    temperature: float = 1.0
    topp: float = 0.0
    topk: int = 0
    minp: float = 0.0
    repeat: float = 0.0
    frequency: float = 0.0
    presence: float = 0.0
    penalty_tokens: int = 0
    biases: dict = field(default_factory=dict)
    mask: list | None = None

    def packed(self):
        """Return the case in the format that tests/sampling.c reads."""
        n, m, b = len(self.logits), len(self.tokens), len(self.biases)
        return struct.pack(
            "<3i6f3i", n, m, self.mask is not None, self.temperature, self.topp, self.minp,
            self.repeat, self.frequency, self.presence, self.topk, self.penalty_tokens, b
        ) + struct.pack(f"<{n}f{m}i{b}i{b}f", *self.logits, *self.tokens, *self.biases,
                        *self.biases.values()) + bytes(self.mask or [])


def sampled(program, mode, cases):
    """Return what tests/sampling.c prints for each case, as arrays (vocabulary,)."""
    done = subprocess.run([program, *mode], input=b"".join(c.packed() for c in cases),
                          capture_output=True)
    assert done.returncode == 0, (done.stdout[-300:], done.stderr[-2000:])
    found = np.frombuffer(done.stdout)
    return np.split(found, np.cumsum([len(c.logits) for c in cases])[:-1])


def reference(case):
    """Apply the definitions in llamac.h in plain Python.

    Return {token: probability}, and whether this set of tokens is safe from rounding.
    """
    logits = list(case.logits)
    for token, bias in case.biases.items():
        logits[token] += bias
    window = {0: 64, -1: len(case.tokens)}.get(case.penalty_tokens, case.penalty_tokens)
    for token, count in Counter(case.tokens[-window:] if window else []).items():
        if case.repeat:
            logits[token] = (logits[token] / case.repeat if logits[token] > 0
                             else logits[token] * case.repeat)
        logits[token] -= count * case.frequency + case.presence
    left = {t: x for t, x in enumerate(logits)
            if x > -math.inf and (case.mask is None or case.mask[t])}
    most = max(left.values())
    if case.temperature == 0:
        return ({max(left, key=lambda t: (left[t], -t)): 1.0},
                all(x == most or most - x > MARGIN for x in left.values()))
    p = {t: math.exp((x - most) / case.temperature) for t, x in left.items()}
    ranked = sorted(p, key=lambda t: (-p[t], t))
    sure = True
    if 0 < case.topk < len(ranked):
        last, next_one = ranked[case.topk - 1:case.topk + 1]
        sure &= left[last] == left[next_one] or left[last] - left[next_one] > MARGIN
        ranked = ranked[:case.topk]
    if case.minp:
        largest = p[ranked[0]]
        sure &= all(p[t] == largest or abs(p[t] / largest - case.minp) > MARGIN * case.minp
                    for t in ranked)
        ranked = [t for t in ranked if p[t] >= case.minp * largest]
    if 0 < case.topp < 1:
        share, total, kept = 0, sum(p[t] for t in ranked), []
        for token in ranked:
            kept.append(token)
            share += p[token] / total
            sure &= abs(share - case.topp) > MARGIN
            if share > case.topp:
                break
        ranked = kept
    total = sum(p[t] for t in ranked)
    return {t: p[t] / total for t in ranked}, sure


def single(x):
    return float(np.float32(x))


def random_case(rng, processors=False):
    """Return a random case. processors: use only settings that transformers has too."""
    n = rng.choice((1, 2, 3, 17, 60, 130))
    logits = [single(rng.gauss(0, rng.choice((0.3, 1, 4)))) for _ in range(n)]
    if rng.random() < 0.3:
        logits = [round(2 * x) / 2 for x in logits]  # many equal logits
    case = Case(logits, [rng.randrange(n) for _ in range(rng.choice((1, 5, 80, 300)))],
                temperature=single(rng.choice((0.3, 0.8, 1, 1.7))),
                topp=single(rng.choice((0, 0.2, 0.5, 0.9, 1))),
                topk=rng.choice((0, 0, 1, 2, 10, n, 1000)),
                minp=single(rng.choice((0, 0, 0.02, 0.3, 1))),
                repeat=single(rng.choice((0, 1, 1.3, 0.7))), penalty_tokens=-1)
    if not processors:
        case.temperature = rng.choice((0, case.temperature, case.temperature, case.temperature))
        case.frequency, case.presence = (single(rng.choice((0, 0, 0.4, -0.5))) for _ in range(2))
        case.penalty_tokens = rng.choice((0, -1, 1, 7, 1000))
        for _ in range(rng.choice((0, 0, 1, 5))):
            case.biases[rng.randrange(n)] = single(rng.choice((-math.inf, 1.5, -2, 100, -100)))
        if rng.random() < 0.4:
            case.mask = [int(rng.random() < 0.5) for _ in range(n)]
        alive = [t for t in range(n) if case.biases.get(t, 0) > -math.inf]
        if not alive or (case.mask and not any(case.mask[t] for t in alive)):
            return random_case(rng)
    return case


def assert_same(case, shares, expected):
    for token, share in enumerate(shares):
        p = expected.get(token, 0)
        assert abs(share - p) < 3e-6, (case, token, share, p)
        # The kernels clamp values below e^-88, so all tokens below that are equally likely
        assert (token in expected
                or share <= 2**-24 * (min(expected.values()) < 1e-30)), (case, token, share)


def test_candidates_and_probabilities_equal_a_plain_loop(program):
    """1,000 random distributions and settings, spread over this machine's instruction sets."""
    rng = random.Random(7)
    cases = [random_case(rng) for _ in range(1000)]
    compared = 0
    for case, shares in zip(cases, sampled(program, ["shares"], cases)):
        expected, sure = reference(case)
        if sure:
            assert_same(case, shares, expected)
            compared += 1
    assert compared > 900, compared


def test_candidates_and_probabilities_equal_transformers(program):
    rng = random.Random(8)
    cases = [random_case(rng, processors=True) for _ in range(300)]
    compared = 0
    for case, shares in zip(cases, sampled(program, ["shares"], cases)):
        steps = [generation.TemperatureLogitsWarper(case.temperature)]
        if case.repeat:
            steps.insert(0, generation.RepetitionPenaltyLogitsProcessor(case.repeat))
        if case.topk:
            steps.append(generation.TopKLogitsWarper(case.topk))
        if case.minp:
            steps.append(generation.MinPLogitsWarper(case.minp))
        if 0 < case.topp < 1:
            steps.append(generation.TopPLogitsWarper(case.topp))
        scores = torch.tensor([case.logits], dtype=torch.float64)
        for step in steps:
            scores = step(torch.tensor([case.tokens]), scores)
        theirs = scores.softmax(-1)[0]
        _, sure = reference(case)
        if not sure or len(set(case.logits)) < len(case.logits):
            continue  # transformers may keep other tokens of equal logits
        assert_same(case, shares, {t: float(p) for t, p in enumerate(theirs) if p > 0})
        compared += 1
    assert compared > 150


def test_extreme_temperatures(program):
    """An infinite temperature makes all tokens equally likely; one near 0 keeps the most likely."""
    rng, cases = random.Random(12), []
    for temperature in (math.inf, 3.4e38, 1e38, 1e20, 1e-20, 1e-30, 3e-39, 1e-40, 1e-45):
        for settings in (dict(), dict(topp=0.5), dict(topk=3), dict(minp=0.5),
                         dict(mask=[1, 0] * 8), dict(biases={3: -math.inf})):
            logits = [single(rng.gauss(0, 2)) for _ in range(16)]
            cases.append(Case(logits, temperature=single(temperature), **settings))
    for case, shares in zip(cases, sampled(program, ["shares"], cases)):
        # rounding decides which of equally likely tokens top-k and top-p keep
        if case.temperature < 1 or not (case.topp or case.topk):
            assert_same(case, shares, reference(case)[0])
        assert shares.sum() == 1


def test_draws_have_their_probabilities(program):
    """Pearson's chi-square test of 10,000 draws for each case.

    No p-value is tiny, and their mean is near 0.5.
    """
    rng, draws, values = random.Random(9), 10_000, []
    cases = [random_case(rng) for _ in range(400)]
    for case, counts in zip(cases, sampled(program, ["draws", str(draws)], cases)):
        expected, sure = reference(case)
        if not sure:
            continue
        assert not any(counts[t] for t in range(len(counts)) if t not in expected)
        common = [t for t in expected if expected[t] * draws >= 5]
        seen, due = [counts[t] for t in common], [expected[t] * draws for t in common]
        if sum(due) < draws - 5:
            seen, due = [*seen, draws - sum(seen)], [*due, draws - sum(due)]
        if len(due) > 1:
            due = np.array(due) * sum(seen) / sum(due)
            square = float(((np.array(seen) - due) ** 2 / due).sum())
            values.append(float(torch.special.gammaincc(torch.tensor((len(due) - 1) / 2),
                                                        torch.tensor(square / 2))))
    assert len(values) > 50, len(values)
    assert min(values) > 1e-5 and 0.35 < np.mean(values) < 0.65


def test_neutral_settings_sample_what_no_settings_do(program):
    """Neutral settings and none give bit-identical results.

    These are a mask that allows all tokens, all tokens as top k, penalties of 1 and 0, and biases
    of 0.
    """
    rng, cases = random.Random(3), []
    for _ in range(40):
        n = rng.choice((2, 60, 130))
        logits = [single(rng.gauss(0, 2)) for _ in range(n)]
        plain = dict(tokens=[0, 1, 1], topp=single(rng.choice((0, 0.3, 0.9))),
                     temperature=single(rng.choice((0.5, 1))))
        cases += [Case(logits, **plain),
                  Case(logits, **plain, topk=n, repeat=1, frequency=0, presence=0, biases={1: 0.0},
                       mask=[1] * n)]
    for first, second in zip(*(sampled(program, ["draws", "300"], cases[i::2]) for i in range(2))):
        assert (first == second).all()


def test_mistakes_are_answered_in_one_line(program, tmp_path):
    Model().write_gguf(tmp_path / "m.gguf")
    done = subprocess.run([program, "wrong", tmp_path / "m.gguf"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    said = done.stdout.splitlines()
    assert all(re.fullmatch("[ -~]{10,}", line) for line in said)
    named = ("temperature is nan", "temperature is -1", "top-p is -5", "top-p is nan",
             "top-k is -1", "min-p is 1.5", "min-p is nan", "repeat penalty is -1",
             "repeat penalty is inf", "frequency penalty is nan", "frequency penalty is -inf",
             "presence penalty is 101", "penalty_tokens is -2", "-1 biases",
             "1 biases, but bias_tokens", "token 300, which is outside", "token -1,",
             "bias of token 0 is nan", "bias of token 0 is inf", "no token is left",
             "no token is left", "no token is left", "bytes, expected 16 to",
             "8 bytes, expected 16 to")
    assert len(said) == len(named)
    for line, name in zip(said, named):
        assert name in line, (line, name)


# ---- texts: which bytes of the tokens may be shown, and when

EOS, RAW, GO_ON = 2, 1, 2


def may_go_on(data):
    """Return whether the incomplete bytes may become a character when more bytes follow."""
    expected = (4 if 0xf0 <= data[0] < 0xf5 else 3 if 0xe0 <= data[0] < 0xf0
                else 2 if 0xc2 <= data[0] < 0xe0 else 1)
    return len(data) < expected and all(0x80 <= b < 0xc0 for b in data[1:])


def characters(data, end, last):
    """Return the complete characters of data[:end], with U+FFFD for each invalid byte.

    last: no bytes follow, so incomplete characters are invalid.
    """
    shown, at = "", 0
    while at < end:
        for n in 1, 2, 3, 4:
            try:
                character = data[at:at + n].decode()
                break
            except UnicodeDecodeError:
                character, n = "�", 1
        if at + n > end or (character == "�" and not last and may_go_on(data[at:])):
            break
        shown, at = shown + character, at + n
    return shown.encode()


def expected_releases(tokens, pieces, stops, flags):
    """Return [(result, bytes), ...] for each token and for the end, computed byte by byte."""
    data, shown, releases = b"", 0, []
    for token in tokens:
        result, piece = 0, pieces[token]
        if token in (1, EOS):
            result, piece = int(not flags & GO_ON), b""
        for byte in piece:
            data += bytes([byte])
            ends = [s for s in stops if data.endswith(s)]
            if ends:
                data, result = data[:-max(map(len, ends))], 2
                break
        held = 0 if result else max(
            (n for s in stops for n in range(len(s)) if n and data.endswith(s[:n])), default=0)
        end = len(data) - held
        text = data[:end] if flags & RAW else characters(data, end, last=bool(result))
        releases.append((result, text[shown:]))
        shown = len(text)
        if result:
            return releases
    text = data if flags & RAW else characters(data, len(data), last=True)
    return [*releases, (0, text[shown:])]


@pytest.fixture(scope="module")
def texts_program(tmp_path_factory):
    return compile_c(
        tmp_path_factory.mktemp("texts") / "texts", *SANITIZE, "tests/texts.c", *LIBRARY)


def test_texts_release_bytes_as_soon_as_they_are_certain(texts_program, tmp_path):
    """2,000 random texts over a few letters, with every flag.

    They contain complete and truncated characters; the stop strings overlap.
    """
    model, rng, lines, cases = Model(), random.Random(11), [], []
    model.write_gguf(tmp_path / "m.gguf")
    pieces = [b"", b"", b"", *(bytes([b]) for b in range(256)), *(p for p, _ in model.pieces[259:])]
    pieces[3 + 32] = b" "
    letters = [3 + b for b in b"AaAab " + "é😀".encode() + b"\xff\xc3"] + [259, 260, 259]  # Aa, Ab
    strings = [s.encode() for s in ("A", "Aa", "aA", "AaAb", "AbAaA", " b", "é", "😀", "aé", "bbbb",
                                    "AaAaAaAb")]
    for _ in range(2000):
        stops = rng.sample(strings, rng.choice((0, 1, 1, 2, 4)))
        flags = rng.choice((0, 0, RAW, GO_ON))
        tokens = ([rng.choice(letters) for _ in range(rng.randrange(25))]
                  + [EOS] * rng.choice((0, 0, 1)))
        if rng.random() < 0.3:  # complete characters only
            tokens = [3 + b for b in "".join(rng.choice("Aa é😀b") for _ in range(8)).encode()]
        lines.append(" ".join([f"{flags} {len(stops)}", *(s.hex() for s in stops),
                               *map(str, tokens), "-1"]))
        cases.append(expected_releases(tokens, pieces, stops, flags))
    done = subprocess.run([texts_program, tmp_path / "m.gguf"], input="\n".join(lines),
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-2000:]
    said = done.stdout.splitlines()
    for line, case, asked in zip(said, cases, lines):
        found = [(int(part.split(":")[0]), bytes.fromhex(part.split(":")[1]))
                 for part in line.split()]
        if case and case[-1][0]:
            assert found.pop() == (-1, b"the text has ended already"), asked
        assert found == case, asked
    mistakes = said[len(cases):]
    assert len(mistakes) == 11, mistakes
    assert all(re.fullmatch("[ -~]{10,}", line) for line in mistakes), mistakes
