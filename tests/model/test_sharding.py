"""Eight virtual devices give the loss and the gradients of one, in the layout of the weights, on every mesh shape."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.config import UserError
from envace_jax.model.qwen3 import ForwardOptions, flatten_heads, forward, init_params
from envace_jax.model.sharding import PARAM_AXES, SAMPLER, Rules, make_mesh, param_shardings
from envace_jax.model.spec import PRESETS

DENSE = dataclasses.replace(PRESETS["tiny"], n_heads=8, n_kv_heads=8, head_dim=4, vocab_size=64, d_ff=32, d_model=32)
MOE = dataclasses.replace(DENSE, n_experts=8, n_experts_per_token=2, d_ff_expert=8, n_layers=1)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 8))
SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 0]] * 8)
POSITIONS = np.array([[0, 1, 2, 3, 4, 0, 1, 0]] * 8)
ALL = [shape for shape in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(shape) == 8]
SOME = [(1, 4, 2, 1), (1, 2, 2, 2)]


def loss(params, spec, rows, options):
    hidden = forward(params, spec, *rows, options=options)
    return jnp.sum(jnp.sin(hidden) * (rows[2] > 0)[..., None]) / rows[0].size


@pytest.fixture(scope="module")
def single():
    done = {}

    def run(spec):
        if spec not in done:
            params = init_params(spec, jax.random.key(0))
            rows = [jnp.asarray(x) for x in (TOKENS, POSITIONS, SEGMENTS)]
            step = jax.jit(lambda p: jax.value_and_grad(loss)(p, spec, rows, ForwardOptions()))
            done[spec] = params, *step(params)
        return done[spec]

    return run


def compare(spec, shape, rules, single, **changes):
    params, want, want_grads = single(spec)
    mesh = make_mesh(*shape)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, param_shardings(params, mesh, rules))
        rows = [jax.device_put(x, rules.spec("batch", "sequence")) for x in (TOKENS, POSITIONS, SEGMENTS)]
        options = ForwardOptions(**{"rules": rules, "remat": "full", **changes})
        got, grads = jax.jit(lambda p, rows: jax.value_and_grad(loss)(p, spec, rows, options))(placed, rows)
    np.testing.assert_allclose(got, want, atol=1e-5)
    leaves = (jax.tree.leaves(tree) for tree in (grads, want_grads, placed))
    for path, grad, expected, weight in zip(jax.tree_util.tree_leaves_with_path(params), *leaves):
        np.testing.assert_allclose(grad, expected, atol=2e-5, err_msg=str(path[0]))
        assert grad.sharding == weight.sharding, path[0]


@pytest.mark.parametrize("shape", SOME, ids=str)
def test_dense_on_some_meshes(shape, single):
    compare(DENSE, shape, Rules(), single)


@pytest.mark.long
@pytest.mark.parametrize("spec", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("shape", ALL, ids=str)
def test_every_mesh_of_eight(spec, shape, single):
    compare(spec, shape, Rules(), single)


def test_experts_and_cut_sequences(single):
    compare(MOE, (1, 2, 2, 2), Rules(sequence="tensor"), single)


def test_a_dense_model_with_cut_sequences(single):
    compare(DENSE, (1, 2, 4, 1), Rules(sequence="tensor"), single)


@pytest.mark.long
def test_experts_in_chunks_of_tokens(single):
    compare(MOE, (1, 2, 1, 4), Rules(), single, moe_chunk=4)  # of the 8 tokens that a shard has


@pytest.mark.long
@pytest.mark.parametrize("spec", [DENSE, MOE], ids=["dense", "moe"])
def test_sequence_over_an_axis_of_its_own(spec, single):
    compare(spec, (1, 4, 2, 1), Rules(batch=("replica", "expert"), sequence="fsdp"), single)


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "full", "attention", "dots", "offload"])
def test_what_is_recomputed_changes_nothing(remat, single):
    compare(DENSE, (1, 4, 2, 1), Rules(), single, remat=remat)


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_with_the_vocabulary_cut(temperature):
    from envace_jax.learning.loss import token_logprobs

    keys = jax.random.split(jax.random.key(0), 3)
    hidden, head = jax.random.normal(keys[0], (2, 16, 8)), jax.random.normal(keys[1], (8, 64))
    targets, mask = jax.random.randint(keys[2], (2, 16), 0, 64), jnp.arange(32).reshape(2, 16) % 16 < 11

    def chunked(hidden, head, targets, mask):
        logprob, entropy = token_logprobs(hidden, targets, mask, head, temperature=temperature, chunk_tokens=8)
        return jnp.sum(logprob * jnp.cos(jnp.arange(16))), (logprob, entropy)

    def naive(hidden, head, targets, mask):
        logprobs = jax.nn.log_softmax(hidden @ head / temperature)
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, -1)
        logprob = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0] * mask
        return jnp.sum(logprob * jnp.cos(jnp.arange(16))), (logprob, entropy * mask)

    step = lambda f: jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))  # noqa: E731
    (_, want), want_grads = step(naive)(hidden, head, targets, mask)
    rules = Rules()
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        place = lambda x, *axes: jax.device_put(x, rules.spec(*axes))  # noqa: E731
        (_, got), grads = step(chunked)(
            place(hidden, "batch", None, None),
            place(head, None, "vocab"),
            place(targets, "batch", None),
            place(mask, "batch", None),
        )
    assert grads[1].sharding.spec == rules.spec(None, "vocab")
    for a, b in zip((*got, *grads), (*want, *want_grads)):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.quick
def test_rules_name_every_parameter_and_known_axes():
    mesh = make_mesh(fsdp=4, tensor=2)
    for spec in (DENSE, MOE, dataclasses.replace(DENSE, tie_embeddings=False)):
        shapes = jax.eval_shape(lambda spec=spec: init_params(spec, jax.random.key(0)))
        for leaf, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(param_shardings(shapes, mesh, Rules()))):
            assert len(sharding.spec) == leaf.ndim
            sharding.shard_shape(leaf.shape)
    fields = {field.name for field in dataclasses.fields(Rules)}
    assert {axis for axes in PARAM_AXES.values() for axis in axes if axis} <= fields


@pytest.mark.quick
def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match="asks for 16 devices, 8 are there"):
        make_mesh(fsdp=16)


@pytest.mark.quick
def test_flat_heads_are_the_same_model():
    params = init_params(DENSE, jax.random.key(0))
    flat = flatten_heads(params)
    assert flat["layers"]["q"].shape == (2, 32, 32) and flatten_heads(flat)["layers"]["q"] is flat["layers"]["q"]
    rows = [jnp.asarray(x) for x in (TOKENS, POSITIONS, SEGMENTS)]
    want = jax.jit(lambda p: forward(p, DENSE, *rows))(params)
    np.testing.assert_allclose(jax.jit(lambda p: forward(p, DENSE, *rows))(flat), want, atol=1e-5)
    mesh = make_mesh(tensor=8)
    with jax.set_mesh(mesh):
        placed = flatten_heads(jax.device_put(params, param_shardings(params, mesh, SAMPLER)))
        for leaf, sharding in zip(jax.tree.leaves(placed), jax.tree.leaves(param_shardings(placed, mesh, SAMPLER))):
            assert leaf.sharding == sharding
        options = ForwardOptions(rules=SAMPLER)
        got = jax.jit(lambda p: forward(p, DENSE, *rows, options=options))(placed)
    np.testing.assert_allclose(got, want, atol=1e-5)
