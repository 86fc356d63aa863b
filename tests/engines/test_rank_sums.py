"""Sums of several workers' parts, on tensors that are split by hand as vLLM splits them."""

import torch

from inference.snapshot import Held, fold_sums, word_sum

Q, K, V, OUT, NORM, EMBED = "q.weight", "k.weight", "v.weight", "out.weight", "norm.weight", "embed.weight"
FUSED = [Q, K, V]


def tensors() -> dict[str, torch.Tensor]:
    """Four query heads and two key heads of 3 rows, an output layer, a norm, and a vocabulary of 9."""
    random = torch.Generator().manual_seed(0)
    shapes = {Q: (12, 8), K: (6, 8), V: (6, 8), OUT: (8, 12), NORM: (8,), EMBED: (9, 8)}
    return {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}


def held(names: list[str], part: torch.Tensor, padding: int = 0) -> Held:
    return names, "bfloat16", f"{word_sum(part):x}", part.numel() - padding


def fused(whole: dict[str, torch.Tensor], rank: int, workers: int, key_workers: int) -> torch.Tensor:
    """A worker's rows of q, k and v; several hold the same key heads where there are fewer heads than workers."""
    key = rank * key_workers // workers
    return torch.cat([whole[Q].chunk(workers)[rank], *(whole[name].chunk(key_workers)[key] for name in (K, V))])


def split(whole: dict[str, torch.Tensor], workers: int, key_workers: int) -> list[list[Held]]:
    rows = -(-len(whole[EMBED]) // workers) + 1
    padded = torch.cat([whole[EMBED], torch.zeros(rows * workers - len(whole[EMBED]), 8).bfloat16()])
    ranks = []
    for rank in range(workers):
        first = rank * rows
        padding = rows - max(0, min(rows, len(whole[EMBED]) - first))
        ranks.append(
            [
                held(FUSED, fused(whole, rank, workers, key_workers)),
                held([OUT], whole[OUT].chunk(workers, dim=1)[rank]),
                held([NORM], whole[NORM]),
                held([EMBED], padded[first : first + rows], padding * 8),
            ]
        )
    return ranks


def shapes(whole: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in whole.items()}


def published(whole: dict[str, torch.Tensor], names: list[str]) -> tuple[list[str], str, str]:
    return names, "bfloat16", f"{sum(word_sum(whole[name]) for name in names) % 2**64:x}"


def test_parts_have_the_sums_of_whole_tensors():
    """Rows, columns, fused q, k and v, copies, and a vocabulary filled up with zeros."""
    whole = tensors()
    every = [published(whole, names) for names in (FUSED, [OUT], [NORM], [EMBED])]
    for workers in (1, 2):
        assert fold_sums(split(whole, workers, workers), shapes(whole)) == every


def test_what_is_neither_a_part_nor_a_copy_is_left_out():
    """Four workers, two of which hold the same key heads: their sums would not be the published ones."""
    whole = tensors()
    assert fold_sums(split(whole, 4, 2), shapes(whole)) == [
        published(whole, names) for names in ([OUT], [NORM], [EMBED])
    ]


def test_one_worker_with_old_weights_is_found():
    """In a part the sum differs; of copies the differing one is returned beside the right one."""
    whole, old = tensors(), {name: tensor + 1 for name, tensor in tensors().items()}
    ranks = [split(whole, 2, 2)[0], split(old, 2, 2)[1]]
    folded = fold_sums(ranks, shapes(whole))
    for names in (FUSED, [OUT], [EMBED]):
        assert names in [part[0] for part in folded] and published(whole, names) not in folded
    copies = [part for part in folded if part[0] == [NORM]]
    assert len(copies) == 2 and {published(each, [NORM])[2] for each in (whole, old)} == {part[2] for part in copies}
