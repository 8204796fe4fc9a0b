"""What the decode program compiles to: buffers aliased, little memory of its own, and shapes from one ladder."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest
from plain import SPEC, make_params

from envace_jax.model import qwen3
from envace_jax.sampling import programs
from envace_jax.sampling.programs import Programs, Shapes


@pytest.mark.quick
@pytest.mark.parametrize(
    "sizes",
    [
        dict(slots=64, shelf=64, max_length=512, chunk=8, prefill_chunk=64),
        dict(slots=4, shelf=0, max_length=20, chunk=4, prefill_chunk=256),
        dict(slots=1, shelf=1, max_length=20000, chunk=16, prefill_chunk=256),
        dict(slots=256, shelf=256, max_length=1000, chunk=32, prefill_chunk=100),
    ],
)
def test_every_need_has_a_shape(sizes):
    shapes = Shapes.plan(**sizes)
    longest = sizes["max_length"] + sizes["chunk"]
    assert all(a < b for a, b in zip(shapes.lengths, shapes.lengths[1:])) and shapes.lengths[-1] >= longest
    for positions in (1, longest // 3, longest // 2 + 1, longest):
        length = shapes.length_for(positions)
        assert length >= positions
        for n, remaining in [(1, 1), (3, 17), (sizes["slots"], sizes["max_length"]), (2, 65)]:
            rows, piece = shapes.prefill_for([remaining] * n, length)
            assert (rows, piece) in shapes.prefill and piece <= length
            assert shapes.contexts(piece, length)[-1] == length
    assert shapes.copy_for(10**6) == sizes["slots"]


def test_decode_keeps_its_cache_in_place():
    """Temporaries stay under 1.2 layers' keys and values, and the cache that comes out is the one that went in."""
    shapes = Shapes.plan(slots=8, shelf=0, max_length=2032, chunk=16, prefill_chunk=64)
    run = Programs(SPEC, qwen3.ForwardOptions(), shapes, stacked=False)
    params = run.hand_over(make_params())
    main = run.cache(8, 2048)
    ints = np.zeros((8, programs.STOPS + shapes.stop_ids), np.int32)
    floats = np.ones((8, 2), np.float32)
    decode = functools.partial(programs.decode, spec=SPEC, options=run.options, chunk=16)
    compiled = jax.jit(decode, donate_argnums=1).lower(params, main, ints, floats, np.int32(1)).compile()
    whole = sum(x.nbytes for x in jax.tree.leaves(main))
    layer = whole // SPEC.n_layers
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= whole
    assert memory.temp_size_in_bytes <= 1.2 * layer, (memory.temp_size_in_bytes, layer)
    shape = re.escape(f"f32[8,{SPEC.n_kv_heads},2048,{SPEC.head_dim}]")
    copies = re.findall(rf"= {shape}\S* copy\(", compiled.as_text())
    assert not copies
