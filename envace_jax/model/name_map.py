"""The one declarative map between Hugging Face tensor names and our parameter tree, read in both directions.

Ours stacks layers (and experts) in front; theirs has one tensor a layer (and expert). An entry says how the axes
of one of their tensors become ours: `"(H h) D -> D H h"` reads a [heads x head size, model] matrix as [model, heads,
head size]. Import reads the arrow from left to right, export from right to left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from envace_jax.model.spec import Qwen3Spec


@dataclass(frozen=True)
class Entry:
    """One parameter of ours and the tensors it is made of."""

    ours: tuple[str, ...]
    theirs: str
    axes: str

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.theirs

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.theirs

    def _sides(self) -> tuple[list[str], list[str]]:
        left, right = self.axes.split(" -> ")
        return left.replace("(", " ").replace(")", " ").split(), right.split()

    def our_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """Shape of one layer's (and expert's) part of our array."""
        return tuple(sizes[axis] for axis in self._sides()[1])

    def their_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        shape: list[int] = []
        group: list[int] | None = None
        for word in self.axes.split(" -> ")[0].replace("(", "( ").replace(")", " )").split():
            if word == "(":
                group = []
            elif word == ")":
                shape.append(math.prod(group or []))
                group = None
            elif group is not None:
                group.append(sizes[word])
            else:
                shape.append(sizes[word])
        return tuple(shape)

    def stack_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """Shape of our whole array, layers and experts in front."""
        front = (sizes["L"],) * self.stacked + (sizes["E"],) * self.per_expert
        return front + self.our_shape(sizes)

    def to_ours(self, tensor: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
        """A view of one of their tensors in our axes."""
        left, right = self._sides()
        return tensor.reshape([sizes[axis] for axis in left]).transpose([left.index(axis) for axis in right])

    def to_theirs(self, part: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
        left, right = self._sides()
        return part.transpose([right.index(axis) for axis in left]).reshape(self.their_shape(sizes))


_LAYER = "model.layers.{layer}."
_ATTENTION = (
    Entry(("layers", "attn_norm"), _LAYER + "input_layernorm.weight", "D -> D"),
    Entry(("layers", "q"), _LAYER + "self_attn.q_proj.weight", "(H h) D -> D H h"),
    Entry(("layers", "k"), _LAYER + "self_attn.k_proj.weight", "(K h) D -> D K h"),
    Entry(("layers", "v"), _LAYER + "self_attn.v_proj.weight", "(K h) D -> D K h"),
    Entry(("layers", "o"), _LAYER + "self_attn.o_proj.weight", "D (H h) -> H h D"),
    Entry(("layers", "q_norm"), _LAYER + "self_attn.q_norm.weight", "h -> h"),
    Entry(("layers", "k_norm"), _LAYER + "self_attn.k_norm.weight", "h -> h"),
    Entry(("layers", "mlp_norm"), _LAYER + "post_attention_layernorm.weight", "D -> D"),
)
_DENSE = (
    Entry(("layers", "gate"), _LAYER + "mlp.gate_proj.weight", "F D -> D F"),
    Entry(("layers", "up"), _LAYER + "mlp.up_proj.weight", "F D -> D F"),
    Entry(("layers", "down"), _LAYER + "mlp.down_proj.weight", "D F -> F D"),
)
_MOE = (
    Entry(("layers", "router"), _LAYER + "mlp.gate.weight", "E D -> D E"),
    Entry(("layers", "experts_gate"), _LAYER + "mlp.experts.{expert}.gate_proj.weight", "F D -> D F"),
    Entry(("layers", "experts_up"), _LAYER + "mlp.experts.{expert}.up_proj.weight", "F D -> D F"),
    Entry(("layers", "experts_down"), _LAYER + "mlp.experts.{expert}.down_proj.weight", "D F -> F D"),
)
EMBED = Entry(("embed",), "model.embed_tokens.weight", "V D -> V D")
FINAL_NORM = Entry(("final_norm",), "model.norm.weight", "D -> D")
LM_HEAD = Entry(("lm_head",), "lm_head.weight", "V D -> D V")


def entries(spec: Qwen3Spec) -> tuple[Entry, ...]:
    """The map for this model, in the order tensors are written."""
    feed_forward = _MOE if spec.is_moe else _DENSE
    return (EMBED, *_ATTENTION, *feed_forward, FINAL_NORM, *(() if spec.tie_embeddings else (LM_HEAD,)))


def axis_sizes(spec: Qwen3Spec) -> dict[str, int]:
    """Size of every letter: V vocabulary, D model, L layers, H query, K key heads, h head size, F hidden, E experts."""
    return {
        "V": spec.vocab_size,
        "D": spec.d_model,
        "L": spec.n_layers,
        "H": spec.n_heads,
        "K": spec.n_kv_heads,
        "h": spec.head_dim,
        "F": spec.d_ff_expert if spec.is_moe else spec.d_ff,
        "E": spec.n_experts,
    }


@dataclass(frozen=True)
class Piece:
    """One of their tensors: the entry it belongs to and its place in our stack (empty when not stacked)."""

    entry: Entry
    name: str
    index: tuple[int, ...]


def pieces(spec: Qwen3Spec) -> Iterator[Piece]:
    """Every tensor of the checkpoint, each once, layer by layer: the order files are written in."""
    for stacked, group in _grouped(entries(spec)):
        for layer in range(spec.n_layers if stacked else 1):
            for entry in group:
                for expert in range(spec.n_experts if entry.per_expert else 1):
                    index = (layer,) * entry.stacked + (expert,) * entry.per_expert
                    yield Piece(entry, entry.theirs.format(layer=layer, expert=expert), index)


def _grouped(all_entries: tuple[Entry, ...]) -> Iterator[tuple[bool, list[Entry]]]:
    group: list[Entry] = []
    for entry in all_entries:
        if group and group[0].stacked != entry.stacked:
            yield group[0].stacked, group
            group = []
        group.append(entry)
    yield group[0].stacked, group
