"""The exact product and the Newton-Schulz iteration: the same bits however sums are ordered, and the right ones."""

from __future__ import annotations

import math
from fractions import Fraction
from operator import mul

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.muon import STEPS, A, B, C, exact_product, frobenius_norm, orthogonalized

SIZES = st.integers(1, 12)


@st.composite
def matrices(draw, rows: int | None = None, columns: int | None = None) -> Tensor:
    """float32, with elements of one size, or of sizes from 2^-140 to 2^126."""
    shape = draw(SIZES) if rows is None else rows, draw(SIZES) if columns is None else columns
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    spread = draw(st.sampled_from([0, 0, 8, 133]))
    exponents = torch.randint(-spread - 7, spread - 6, shape, generator=generator).double()
    return (torch.randn(shape, generator=generator).double().clamp(-2, 2) * 2**exponents).float()


def rounded(values: list[list[Fraction]], inner: int) -> list[list[Fraction]]:
    """To multiples of 2^s, ties to even, where the largest element has k bits: 2 k + ceil(log2(inner)) <= 53."""
    largest = max(abs(value) for row in values for value in row)
    if not largest:
        return values
    bits = max(k for k in range(27) if 2 * k + math.ceil(math.log2(inner)) <= 53)
    unit = Fraction(2) ** (math.frexp(float(largest))[1] - bits)
    return [[round(value / unit) * unit for value in row] for row in values]


def fractions(matrix: Tensor) -> list[list[Fraction]]:
    return [[Fraction(value) for value in row] for row in matrix.tolist()]


# The product of the rounded operands is exact: it is what rational arithmetic gives.
@settings(deadline=None)
@given(st.data(), SIZES, SIZES, SIZES)
def test_product_is_exact(data, rows, inner, columns):
    left, right = data.draw(matrices(rows, inner)), data.draw(matrices(inner, columns))
    ours = fractions(exact_product(left.double(), right.double()))
    a, b = rounded(fractions(left), inner), rounded(fractions(right), inner)
    assert ours == [[sum(map(mul, row, column)) for column in zip(*b, strict=True)] for row in a]


# No order of summation and no number of threads gives other bits, also where the sums are as large as they can be.
@pytest.mark.parametrize("inner", [1, 2, 3, 64, 1000, 1025])
@pytest.mark.parametrize("constant", [False, True])
def test_order_does_not_matter(inner, constant):
    generator = torch.Generator().manual_seed(inner)
    left, right = torch.randn(33, inner, generator=generator), torch.randn(inner, 17, generator=generator)
    if constant:
        left, right = torch.full_like(left, 1 - 2**-24), torch.full_like(right, 1 - 2**-24)
    left, right = left.double(), right.double()
    expected = exact_product(left, right)
    for _ in range(3):
        order = torch.randperm(inner, generator=generator)
        assert exact_product(left[:, order], right[order]).equal(expected)
    half = inner // 2
    assert expected.equal(_in_two_parts(left, right, half))
    assert exact_product(right.T, left.T).T.equal(expected)
    torch.set_num_threads(2)
    try:
        assert exact_product(left, right).equal(expected)
    finally:
        torch.set_num_threads(1)


def _in_two_parts(left: Tensor, right: Tensor, half: int) -> Tensor:
    """The sum of two products, whose operands are the rounded ones of the whole."""
    inner = left.shape[1]
    a, b = (
        torch.tensor([list(map(float, row)) for row in rounded(fractions(each), inner)], dtype=torch.float64)
        for each in (left, right)
    )
    return a[:, half:] @ b[half:] + a[:, :half] @ b[:half]


# Sums of zeros are +0, whichever signs their zeros have and whichever way a library takes for these sizes.
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 5), (5, 1, 1), (5, 1, 5), (4, 3, 4), (1, 64, 5), (64, 64, 64)])
def test_zeros_are_positive(shape):
    rows, inner, columns = shape
    left, right = -torch.ones(rows, inner).double(), torch.zeros(inner, columns).double()
    for zeros in (exact_product(left, right), exact_product(right.T, left.T), exact_product(left, -right)):
        assert not zeros.any() and not zeros.signbit().any()


def bits(matrix: Tensor) -> Tensor:
    """Equal where every bit of float32 is, the sign of a zero too."""
    return matrix.contiguous().view(torch.int32)


# The order of the columns of a matrix is that of its result's and no more, one or two threads give the same bits, its
# transpose has the transposed result, and a power of two changes nothing; also where a row and a column are zero.
@pytest.mark.parametrize("shape", [(1, 5), (16, 48), (48, 16), (96, 257)])
@pytest.mark.parametrize("zeros", [False, True])
def test_bits_of_the_iteration(shape, zeros):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator)
    if zeros:
        matrix[-1], matrix[:, 0] = 0.0, -0.0
    expected = bits(orthogonalized(matrix))
    assert bits(orthogonalized(matrix.T).T).equal(expected)
    long = 0 if shape[0] > shape[1] else 1
    order = torch.randperm(shape[long], generator=generator)
    assert bits(orthogonalized(matrix.index_select(long, order))).equal(expected.index_select(long, order))
    for scale in (2.0**-100, 2.0**120):
        assert bits(orthogonalized(matrix * scale)).equal(expected)
    torch.set_num_threads(2)
    try:
        assert bits(orthogonalized(matrix)).equal(expected)
    finally:
        torch.set_num_threads(1)


def plain(matrix: Tensor) -> Tensor:
    """The same iteration in float64 as it stands in the book."""
    if matrix.shape[0] > matrix.shape[1]:
        return plain(matrix.T).T
    x = matrix.double() / matrix.double().norm()
    for _ in range(STEPS):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x


# Within 1e-4 of the iteration in float64, and of torch.optim.Muon's in bfloat16 within that type's precision.
@pytest.mark.parametrize("shape", [(1, 7), (48, 48), (192, 48), (64, 300)])
def test_against_float64_and_torch(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    found, expected = orthogonalized(matrix), plain(matrix)
    assert (found - expected).norm() < 1e-4 * expected.norm() and (found - expected).abs().max() < 1e-4
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = matrix
    torch.optim.Muon([parameter], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    theirs = -parameter.detach() / math.sqrt(max(1.0, shape[0] / shape[1]))
    assert (found - theirs).norm() < 0.03 * expected.norm()


# Whatever the elements are, no singular value of the result is above the quintic's largest, and the norm is the norm.
@settings(deadline=None)
@given(matrices())
def test_results_are_bounded(matrix):
    assert torch.linalg.matrix_norm(orthogonalized(matrix).double(), 2) < 1.21
    assert frobenius_norm(matrix) == pytest.approx(matrix.double().norm().item(), rel=1e-5)


# No direction, no step; the smallest and the largest numbers have one.
def test_edges():
    assert orthogonalized(torch.zeros(3, 5)).equal(torch.zeros(3, 5))
    for shape in [(0, 3), (3, 0), (0, 0)]:
        assert orthogonalized(torch.zeros(shape)).shape == shape
    eye = orthogonalized(torch.eye(4))
    for value in (1e-45, 1e-38, 3e38):
        assert orthogonalized(torch.eye(4) * value).equal(eye)
    assert orthogonalized(torch.full((1, 1), -3e38)).item() == -orthogonalized(torch.ones(1, 1)).item()
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"of shape \[2, 2\] holds NaN or infinity"):
            orthogonalized(torch.tensor([[1.0, value], [0.0, 1.0]]))


# A GPU gives the CPU's bits.
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bits_on_cuda():
    for shape in [(48, 144), (1024, 1024), (300, 2048)]:
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        matrix[0] = 0.0
        assert bits(orthogonalized(matrix.cuda()).cpu()).equal(bits(orthogonalized(matrix)))
