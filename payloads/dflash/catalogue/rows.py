"""The numbers of one row under one configuration, as terms.

Shape letters: S context tokens, N blocks, B slots of a block, T = N·B slots, K key rows, Q query rows,
R valid slots, C rows of a chunk of the loss, P teacher tokens of one, H hidden, F features, A query heads,
G key-value heads, D head_dim, I intermediate, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dflash.catalogue.parameters import Parameters
from dflash.catalogue.terms import Free, Term, least_of, term, tiled
from dflash.tiling import CHUNK_SLOTS, PART_COLUMNS, TILE_ROWS

TOKEN_BUDGET = 8192  # what a batch of the trainer is packed to; no context is longer unless parameters say so


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of documents; every token is a label, as in the probes."""

    parameters: Parameters
    lengths: tuple[int, ...]
    expression: str

    def number(self, name: str) -> Term:
        """Return one parameter."""
        return term(name, getattr(self.parameters, name))

    @cached_property
    def S(self) -> Term:
        """Context tokens; a batch has as many as its documents."""
        tokens = sum(self.lengths)
        free = Free(name="context tokens", value=tokens, least=2, most=max(TOKEN_BUDGET, tokens))
        return term(self.expression, tokens, free=free)

    @cached_property
    def N(self) -> Term:
        """Blocks: every token but a document's last could start one."""
        possible = sum(length - 1 for length in self.lengths)
        anchors = self.number("max_anchors")
        if anchors.value <= possible:
            return anchors
        return least_of(anchors, term("possible anchors", possible))

    @cached_property
    def T(self) -> Term:
        """Drafted slots."""
        return self.N * self.number("block_size")

    @cached_property
    def K(self) -> Term:
        """Key rows in the order of most backends."""
        return self.S + self.T

    @property
    def is_tiled(self) -> bool:
        """Whether queries and keys come in whole tiles."""
        return self.parameters.backend == "flex" and self.parameters.is_compiled

    @cached_property
    def key_rows(self) -> Term:
        """Key rows as the backend wants them."""
        return tiled(self.S, TILE_ROWS) + tiled(self.T, TILE_ROWS) if self.is_tiled else self.K

    @cached_property
    def query_rows(self) -> Term:
        """Query rows as the backend wants them."""
        return tiled(self.T, TILE_ROWS) if self.is_tiled else self.T

    @cached_property
    def R(self) -> Term:
        """Slots that carry loss: all but each block's first, less what runs past its document's end."""
        block = self.number("block_size").value
        most = self.N.value * (block - 1)
        return term(
            f"{self.N.expression} · (block_size − 1)",
            most,
            numbers=f"{self.N.numbers} · ({block} − 1)",
            free=Free(name="valid slots", value=most, least=min(1, most), most=most),
        )

    @cached_property
    def rows_of_a_token(self) -> int:
        """The most rows that one token teaches."""
        return min(self.N.value, self.number("block_size").value - 1)

    @cached_property
    def C(self) -> Term:
        """Rows of the largest chunk of the loss; chunks end between teacher tokens."""
        chunk = self.number("loss_chunk_rows")
        rows = min(chunk.value, self.R.value)
        least = 1 if self.R.value <= chunk.value else max(1, chunk.value - self.rows_of_a_token + 1)
        most = max(rows, min(self.rows_of_a_token, self.R.value))
        free = Free(name="rows of a chunk", value=rows, least=min(least, rows), most=most)
        if self.R.value <= chunk.value:
            return term(self.R.expression, rows, numbers=self.R.numbers, free=free)
        return term(chunk.expression, rows, free=free)

    @cached_property
    def any_C(self) -> Term:
        """Rows of whichever chunk of the loss: the last may have few."""
        assert self.C.free is not None
        return replace(self.C, free=replace(self.C.free, least=1))

    @cached_property
    def P(self) -> Term:
        """Teacher tokens of the chunk that has most of them; how many it has is up to the drawn anchors."""
        rows, tokens = self.C.value, sum(self.lengths) - 1
        expected = max(1, min(rows, -(-rows * min(self.R.value, tokens) // max(1, self.R.value))))
        free = Free(
            name="teacher tokens of a chunk",
            value=expected,
            least=max(1, rows // max(1, self.rows_of_a_token)),
            most=max(1, min(self.C.value, tokens)),
        )
        return term(f"teacher tokens of {self.C.expression}", expected, free=free)

    @cached_property
    def H(self) -> Term:
        """Hidden width."""
        return self.number("hidden_size")

    @cached_property
    def F(self) -> Term:
        """Width of the joined target states."""
        layers = len(self.parameters.target_layer_ids)
        return term("target layers", layers) * self.H

    @cached_property
    def A(self) -> Term:
        """Query heads."""
        return self.number("num_attention_heads")

    @cached_property
    def G(self) -> Term:
        """Key-value heads."""
        return self.number("num_key_value_heads")

    @cached_property
    def D(self) -> Term:
        """Width of a head."""
        return self.number("head_dim")

    @cached_property
    def half_D(self) -> Term:
        """Dimensions of a head that rotate with another one."""
        return term("head_dim / 2", self.D.value // 2, numbers=f"{self.D.value} / 2")

    @cached_property
    def group(self) -> Term:
        """Query heads that share a key-value head."""
        heads = self.A.value // self.G.value
        expression = "num_attention_heads / num_key_value_heads"
        return term(f"({expression})", heads, numbers=f"({self.A.value} / {self.G.value})")

    @cached_property
    def I(self) -> Term:  # noqa: E743  the letter that the payload uses
        """Intermediate width."""
        return self.number("intermediate_size")

    @cached_property
    def part_columns(self) -> Term:
        """Intermediate columns that backward computes again at a time."""
        return least_of(self.I, term(str(PART_COLUMNS), PART_COLUMNS))

    @cached_property
    def V(self) -> Term:
        """Vocabulary."""
        return self.number("vocab_size")

    @cached_property
    def math_blocks(self) -> Term:
        """Blocks that the math path takes at a time."""
        chunk = self.number("chunk_blocks")
        return chunk if chunk.value <= self.N.value else self.N

    @cached_property
    def last_math_blocks(self) -> Term | None:
        """Blocks of its last chunk, where that has fewer."""
        left = self.N.value % self.math_blocks.value
        if not left:
            return None
        expression = f"{self.N.expression} mod chunk_blocks"
        return term(expression, left, numbers=f"{self.N.numbers} mod {self.math_blocks.value}")

    @cached_property
    def block_keys(self) -> Term:
        """Keys of one block: the whole context and its own slots."""
        return self.S + self.number("block_size")

    @cached_property
    def chunk_slots(self) -> Term:
        """Slots that the fused kernel takes at a time."""
        block = self.number("block_size")
        blocks = max(1, CHUNK_SLOTS // block.value)
        chunk = term(f"({CHUNK_SLOTS} // block_size)", blocks, numbers=f"({CHUNK_SLOTS} // {block.value})")
        return (chunk if blocks <= self.N.value else self.N) * block

    @cached_property
    def chunk_keys(self) -> Term:
        """Keys of such a chunk: that, and its own slots."""
        return self.chunk_context + self.chunk_slots

    @cached_property
    def chunk_context(self) -> Term:
        """Context tokens that such a chunk's slots can see, at most."""
        tokens = sum(self.lengths)
        most = max(TOKEN_BUDGET, tokens)
        free = Free(name="context tokens that a chunk sees", value=tokens, least=0, most=most)
        return term(self.expression, tokens, free=free)


def rows_of(parameters: Parameters) -> Sequence[Row]:
    """Return the rows that a probe runs."""
    return (
        Row(parameters=parameters, lengths=(parameters.seq_len,), expression="seq_len"),
        Row(parameters=parameters, lengths=parameters.packed_lengths, expression="Σ packed_lengths"),
    )
