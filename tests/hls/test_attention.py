"""The HLS kernels of attention against the same arithmetic in numpy, bit for bit, and against exact attention."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from parts import is_there, missing

from edgeinfer.hls.attention import decode_attention, exp_of_negative, prefill_attention, write_golden

HLS = Path(__file__).parents[2] / "hls"
# Head size, lanes, heads of a group, tokens together: a head of 48 has three chunks, which the tree fills up to four.
KERNELS = [(64, 16, 3, 2), (48, 16, 1, 4)]
POSITIONS = 64


def inputs(seed, n_kv, group, head_dim, n_tokens, stride):
    rng = np.random.default_rng(seed)
    q = rng.normal(0, 4, (n_tokens, n_kv * group, head_dim)).astype(np.float32)
    keys, values = rng.normal(0, 1, (2, n_kv, stride, head_dim)).astype(np.float16)
    keys[:, :, 0] *= np.float16(1e-6)  # subnormal numbers
    return q, keys, values


def exact(q, keys, values, scale):
    k, v = (np.repeat(each.astype(np.float64), len(q) // len(keys), axis=0) for each in (keys, values))
    scores = np.einsum("hd,hnd->hn", q.astype(np.float64), k) * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hn,hnd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def test_the_exponential_is_within_two_units_in_the_last_place() -> None:
    x = -np.linspace(0, 86.9, 100_001, dtype=np.float32)
    assert np.abs(exp_of_negative(x) / np.exp(x.astype(np.float64)) - 1).max() < 2.1 * 2**-23
    assert exp_of_negative(np.float32([-87.1, -1e30, 0])).tolist() == [0, 0, 1]


def test_it_is_attention() -> None:
    q, keys, values = inputs(1, 2, 3, 48, 1, 40)
    found = decode_attention(q[0], keys, values, 0.2)
    assert np.abs(found - exact(q[0], keys, values, 0.2)).max() < 2e-6
    many = np.concatenate([q] * 40)
    for token, row in enumerate(prefill_attention(many, keys, values, 0.2)):
        assert np.array_equal(row, decode_attention(q[0], keys[:, : token + 1], values[:, : token + 1], 0.2))


@pytest.fixture(scope="module", params=KERNELS, ids=str)
def bench(request, tmp_path_factory):
    """The test bench of a kernel with undefined behaviour as an error."""
    if not is_there("compiler"):
        missing("compiler", "there is no C++ compiler")
    program = tmp_path_factory.mktemp("attention") / "bench"
    names = ("HEAD_DIM", "LANES", "GROUP", "TOKENS")
    macros = [f"-DEI_{name}={n}" for name, n in zip(names, request.param, strict=True)]
    flags = "-std=c++14 -O1 -Wall -Wextra -Werror -Wno-unknown-pragmas -ffp-contract=off".split()
    sanitized = ["-fsanitize=undefined", "-fno-sanitize-recover=all", f"-DEI_MAX_POSITIONS={POSITIONS}"]
    source = [f"-I{HLS / 'include'}", str(HLS / "tb" / "tb_attention.cpp"), "-o", str(program)]
    subprocess.run(["c++", *flags, *sanitized, *macros, *source], check=True, timeout=120)
    return program, request.param


@pytest.mark.parametrize("shape", [(1, 0, 1), (2, 5, 1), (3, 0, 9), (1, 24, 17)], ids=str)
def test_the_kernels_give_the_bits_of_numpy(bench, shape, tmp_path) -> None:
    """n_kv_heads, first position, tokens."""
    program, (head_dim, _, group, _) = bench
    n_kv, first, n_tokens = shape
    write_golden(
        tmp_path, *inputs(2, n_kv, group, head_dim, n_tokens, first + n_tokens + 2), 0.3, first, first + n_tokens
    )

    def run(*arguments):
        return subprocess.run([program, tmp_path, *arguments], capture_output=True, text=True, timeout=60)

    equal, mutated = run(), run("--mutate")
    n_values = n_tokens * n_kv * group * head_dim
    assert equal.stdout == f"csim attention values={n_values} prefill mismatches=0 decode mismatches=0\n", equal.stderr
    assert equal.returncode == 0
    assert mutated.returncode == 1 and "prefill mismatches=1 decode mismatches=1" in mutated.stdout


def test_vectors_of_another_kernel_and_short_files_are_named(bench, tmp_path) -> None:
    program, (head_dim, _, group, _) = bench
    write_golden(tmp_path, *inputs(3, 1, group, head_dim * 2, 1, 4), 0.3, 0, 1)
    other = subprocess.run([program, tmp_path], capture_output=True, text=True, timeout=60)
    assert other.returncode == 2 and f"found {head_dim * 2}" in other.stderr
    write_golden(tmp_path, *inputs(3, 1, group, head_dim, 1, 4), 0.3, 0, 1)
    (tmp_path / "keys.bin").write_bytes((tmp_path / "keys.bin").read_bytes()[:-2])
    short = subprocess.run([program, tmp_path], capture_output=True, text=True, timeout=60)
    assert short.returncode == 2 and "keys.bin must have" in short.stderr and "fewer" in short.stderr
