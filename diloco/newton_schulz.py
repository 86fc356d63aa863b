"""The Newton-Schulz iteration of Muon with the same bits on every machine, so that peers can take it as an outer step.

    X <- M / |M|_F;   five times   A = X X^T,   X <- a X + (b A + c A A) X

It brings the singular values of M near 1 (Keller Jordan, https://kellerjordan.github.io/posts/muon/; at scale:
arXiv 2502.16982). torch.optim.Muon computes it in bfloat16, and what a product of matrices comes to then depends on the
order in which it is summed: on the library, the processor and the number of threads. Here it does not:

1. Before a product, both operands are rounded to integers n 2^s, |n| <= 2^k, with 2 k + ceil(log2(inner size)) <= 53.
   Then every product of two elements and every partial sum, in any order, fused or not, is an integer of at most 2^53,
   which float64 holds: nothing is rounded, so there is nothing to differ but the sign of a zero, which is made +.
   Scaling by 2^s is exact too.
2. All else is elementwise float64, one operation after the other, each rounded once as IEEE 754 says (no fused
   multiply-add, no division by a scalar, which is a product on CUDA), and Python's own arithmetic.

It relies on products of matrices that add up products of elements in float64; Strassen's algorithm and emulated types
do not, and no library takes them unless told to. k is 21 for inner sizes up to 2048 and 20 up to 8192: an operand loses
2^-k of its largest element, where bfloat16 loses 2^-9 of each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
"""Keller Jordan's coefficients, which torch.optim.Muon has too."""
STEPS = 5


def orthogonalized(matrix_mn: Tensor) -> Tensor:
    """U S' V^T for `matrix_mn` = U S V^T with S' between about 0.7 and 1.2; float32 [m, n], on the same device.

    Singular values below about 1/500 of the Frobenius norm come out smaller. Only the direction of `matrix_mn` counts,
    which is float32, however short or long it is; zeros give zeros. A transposed matrix gives the transposed result, a
    square one nearly so.

    Raises ValueError when an element is NaN or infinite.
    """
    rows, columns = matrix_mn.shape
    if rows > columns:
        return orthogonalized(matrix_mn.T).T
    x_mn, _ = _integers(matrix_mn.to(torch.float64), columns)
    norm = math.sqrt(_sum_of_squares(x_mn))
    if not norm:
        return torch.zeros_like(matrix_mn)
    x_mn = x_mn * (1.0 / norm)
    for _ in range(STEPS):
        gram_mm = exact_product(x_mn, x_mn.T)
        powers_mm = gram_mm * B + exact_product(gram_mm, gram_mm) * C
        x_mn = x_mn * A + exact_product(powers_mm, x_mn)
    return x_mn.to(torch.float32)


def frobenius_norm(matrix_mn: Tensor) -> float:
    """Of float32 [m, n], to about 2^-20, with the same bits on every machine.

    Raises ValueError when an element is NaN or infinite.
    """
    integers_mn, exponent = _integers(matrix_mn.to(torch.float64), matrix_mn.shape[1])
    return math.ldexp(math.sqrt(_sum_of_squares(integers_mn)), exponent)


def _sum_of_squares(integers_mn: Tensor) -> int:
    """Of integers as `_integers` gives them for sums of n: each row's is exact in any order."""
    return sum(map(int, (integers_mn * integers_mn).sum(dim=1).tolist()))


def exact_product(left_mi: Tensor, right_in: Tensor) -> Tensor:
    """The product of both, first rounded to `_integers`; float64 [m, n], with the same bits on every machine."""
    inner = left_mi.shape[1]
    (left_mi, left), (right_in, right) = _integers(left_mi, inner), _integers(right_in, inner)
    return (left_mi @ right_in) * 2.0 ** (left + right) + 0.0  # libraries start sums at 0.0, or at the first product


def _integers(values: Tensor, inner: int) -> tuple[Tensor, int]:
    """Float64 integers n and an exponent s such that n 2^s are `values`, rounded for sums of `inner` products.

    Raises ValueError when an element is NaN or infinite.
    """
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not math.isfinite(largest):
        raise ValueError(f"a matrix of shape {list(values.shape)} holds NaN or infinity")
    bits = (53 - max(0, inner - 1).bit_length()) // 2
    exponent = math.frexp(largest)[1] - bits
    return (values * 2.0**-exponent).round_(), exponent
