"""Order of the bytes of a block, which moves between host and GPU in one piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from helix.memory.keeps import Keeps

WORD = 4  # bytes
ALIGNED = 16  # bytes: each part of a block begins at a multiple, for loads of that many


@dataclass(frozen=True)
class BlockShape:
    """A page of one KV head in one layer: its keys, its values, then the scales of those in e4m3.

    Attributes:
        page_size: tokens of a page.
        parts: what a block holds, in the order of its bytes.
    """

    page_size: int
    parts: tuple[Keeps, ...]

    @classmethod
    def of(cls, keeps: Iterable[Iterable[Keeps]], page_size: int) -> BlockShape:
        """Creates the shape for the data of layers of which all that read whole sequences keep the same."""
        (parts,) = {tuple(k for k in kept if k.is_paged and k.per == "token") for kept in keeps} - {()}
        return cls(page_size, tuple(sorted(parts, key=lambda k: k.by_head)))

    @property
    def heads(self) -> int:
        """Number of KV heads on the rank."""
        return self.parts[0].entry[0]

    @property
    def words(self) -> int:
        """Number of 32-bit words of a block."""
        return sum(map(self._words, self.parts))

    @property
    def bytes(self) -> int:
        return self.words * WORD

    def views(self, blocks: Tensor, heads: int) -> dict[str, Tensor]:
        """Views blocks as pages of `heads` KV heads each.

        Args:
            blocks: [..., n * heads, words] int32, last dim contiguous.

        Returns:
            By name, keys and values [..., n, page_size, heads, D], and scales [..., n, heads, page_size].
        """
        found, begin = {}, 0
        for part in self.parts:
            end = begin + self._words(part)
            numbers = blocks[..., begin:end].view(part.dtype).unflatten(-2, (blocks.shape[-2] // heads, heads))
            numbers = numbers[..., : self.page_size * self._width(part)]
            if not part.by_head:
                numbers = numbers.unflatten(-1, (self.page_size, -1)).transpose(-3, -2)
            found[part.name], begin = numbers, end
        return found

    def _width(self, part: Keeps) -> int:
        return 1 if part.by_head else part.entry[1]

    def _words(self, part: Keeps) -> int:
        size = self.page_size * self._width(part) * part.dtype.itemsize
        return -(-size // ALIGNED) * ALIGNED // WORD
