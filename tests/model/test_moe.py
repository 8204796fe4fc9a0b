"""Mixture of experts: transformers as the oracle, routing figures, replay, the exchange between expert shards."""

from __future__ import annotations

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.config import UserError
from envace_jax.model.hf import load_params
from envace_jax.model.moe import balance_loss, grouped_matmul, moe_mlp, route, routed_differently
from envace_jax.model.qwen3 import ForwardOptions, forward_with_routing, unembed
from envace_jax.model.sharding import MESH_AXES, SAMPLER, Rules, make_mesh
from envace_jax.model.spec import PRESETS, Qwen3Spec
from envace_jax.planning.hlo import by_axis, collectives

SPEC = dataclasses.replace(PRESETS["tiny"], n_experts=8, n_experts_per_token=3, d_ff_expert=16, d_model=32)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 17))
POSITIONS = jnp.broadcast_to(jnp.arange(17), (2, 17))
OPTIONS = ForwardOptions()


def layer_inputs(seed: int = 0, batch: int = 8, length: int = 4):
    keys = jax.random.split(jax.random.key(seed), 5)
    d, e, f = SPEC.d_model, SPEC.n_experts, SPEC.d_ff_expert
    shapes = [(batch, length, d), (d, e), (e, d, f), (e, d, f), (e, f, d)]
    x, router, *experts = (jax.random.normal(k, s) * 0.3 for k, s in zip(keys, shapes))
    return x, router, tuple(experts)


def by_hand(x_BxTxD, router, experts):
    """Every expert for every token, then the weighted sum of the chosen ones."""
    gate, up, down = experts
    ids, weights, *_ = route(SPEC, x_BxTxD.reshape(-1, SPEC.d_model) @ router)
    flat = x_BxTxD.reshape(-1, SPEC.d_model)
    hidden = jax.nn.silu(jnp.einsum("nd,edf->enf", flat, gate)) * jnp.einsum("nd,edf->enf", flat, up)
    every = jnp.einsum("enf,efd->end", hidden, down)
    chosen = jnp.take_along_axis(jnp.moveaxis(every, 0, 1), ids[..., None], axis=1)
    return (chosen * weights[..., None]).sum(1).reshape(x_BxTxD.shape)


@pytest.mark.quick
def test_layer_equals_the_plain_sum_over_chosen_experts():
    x, router, experts = layer_inputs()
    want, pull = jax.vjp(by_hand, x, router, experts)
    got, pull_ours = jax.vjp(lambda *a: moe_mlp(SPEC, *a)[0], x, router, experts)
    np.testing.assert_allclose(got, want, atol=2e-5)
    for a, b in zip(jax.tree.leaves(pull_ours(want)), jax.tree.leaves(pull(want))):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_chunks_of_tokens_change_nothing():
    x, router, experts = layer_inputs()

    def run(chunk):
        return jax.value_and_grad(lambda x: jnp.sum(moe_mlp(SPEC, x, router, experts, chunk=chunk)[0] ** 2))(x)

    (whole, whole_grad), (parts, parts_grad) = run(0), run(8)
    np.testing.assert_allclose(whole, parts, rtol=1e-5)
    np.testing.assert_allclose(whole_grad, parts_grad, atol=1e-5)


def placed(rules, x, router, experts):
    """The layer's inputs on the current mesh."""
    place = lambda a, *axes: jax.device_put(a, rules.spec(*axes))  # noqa: E731
    *wide, narrow = experts
    shards = (*(place(w, "experts", None, "expert_ffn") for w in wide), place(narrow, "experts", "expert_ffn", None))
    return place(x, "batch", None, None), place(router, None, None), shards


@pytest.mark.parametrize("rules", [Rules(), SAMPLER])
@pytest.mark.parametrize("chunk", [0, 2])
def test_gradients_over_shards_equal_one_device_and_are_summed_by_token(rules, chunk):
    inputs = layer_inputs()

    def pulled(*inputs):
        return jax.grad(lambda *a: jnp.sum(moe_mlp(SPEC, *a, rules=rules, chunk=chunk)[0] ** 2), (0, 1, 2))(*inputs)

    want, mesh = pulled(*inputs), make_mesh(expert=4, tensor=2)
    with jax.set_mesh(mesh):
        program = jax.jit(pulled).lower(*placed(rules, *inputs)).compile()
        for got, expected in zip(jax.tree.leaves(program(*placed(rules, *inputs))), jax.tree.leaves(want)):
            np.testing.assert_allclose(got, expected, atol=1e-4)
    if rules == Rules():
        moved = by_axis(collectives(program.as_text(), tuple(mesh.shape.values()), MESH_AXES))
        states = 4 * SPEC.d_model * 8 * 4 / 4  # float32, one shard's tokens; an all-reduce of two receives it once
        # Output, recomputed output, gradient, the router's. Summed by assignment it would be 12 times the gradient.
        assert moved["tensor"] <= 4 * states


@pytest.mark.parametrize("skewed", [False, True])
def test_expert_shards_exchange_tokens_without_loss(skewed):
    x, router, experts = layer_inputs()
    if skewed:  # every token to the experts of one shard: dropless must still hold
        router = router.at[0, 3:].add(-100.0)
        x = x.at[..., 0].set(1.0)
    want, counts = moe_mlp(SPEC, x, router, experts)
    with jax.set_mesh(make_mesh(expert=4, tensor=2)):
        got, routing = jax.jit(lambda *a: moe_mlp(SPEC, *a))(*placed(Rules(), x, router, experts))
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_array_equal(routing.ids, counts.ids)
    np.testing.assert_allclose(routing.counts, counts.counts)


@pytest.mark.parametrize("normed", [True, False])
def test_forward_and_gradients_equal_transformers(normed, hf_folder):
    torch = pytest.importorskip("torch", reason="torch is the oracle")

    from envace_jax.model.name_map import axis_sizes, pieces

    model, folder = hf_folder(moe=True) if normed else hf_folder(moe=True, norm_topk_prob=False)
    spec = Qwen3Spec.from_hf_config(folder)
    assert spec.is_moe and spec.norm_topk_prob == normed
    params = load_params(folder, spec)
    tokens = torch.tensor(TOKENS)
    their = model(tokens, output_router_logits=True, labels=tokens, use_cache=False)
    coefficient = 0.5
    plain = torch.nn.functional.cross_entropy(their.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    model.zero_grad()
    (plain + coefficient * their.aux_loss).backward()

    def loss(params):
        hidden, routing = forward_with_routing(params, spec, jnp.asarray(TOKENS), POSITIONS, jnp.ones_like(POSITIONS))
        logits = unembed(params, hidden, OPTIONS)
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        cross_entropy = -jnp.take_along_axis(logprobs, TOKENS[:, 1:, None], axis=-1).mean()
        balance = balance_loss(spec, routing)
        return cross_entropy + coefficient * balance, (logits, balance)

    (total, (logits, balance)), grads = jax.value_and_grad(loss, has_aux=True)(params)
    np.testing.assert_allclose(logits, their.logits.detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(float(balance), float(their.aux_loss), rtol=1e-4)
    theirs = gradients_by_published_name(model)
    sizes = axis_sizes(spec)
    for piece in pieces(spec):
        ours = grads
        for key in piece.entry.ours:
            ours = ours[key]
        ours = piece.entry.to_theirs(np.asarray(ours[piece.index]), sizes)
        np.testing.assert_allclose(ours, theirs[piece.name], atol=1e-4, rtol=1e-3, err_msg=piece.name)


def gradients_by_published_name(model):
    """transformers 5 fuses the experts' matrices in memory; the published names have one tensor each."""
    out = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad.numpy()
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(grad):
                gate, up = np.split(both, 2, axis=0)
                stem = name.replace("gate_up_proj", str(e))
                out[f"{stem}.gate_proj.weight"], out[f"{stem}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for e, one in enumerate(grad):
                out[name.replace("down_proj", f"{e}.down_proj.weight")] = one
        else:
            out[name] = grad
    return out


def test_replayed_routing_is_used_and_counted(hf_folder):
    _, folder = hf_folder(moe=True)
    spec = Qwen3Spec.from_hf_config(folder)
    params = load_params(folder, spec)
    run = lambda params, replay=None: forward_with_routing(  # noqa: E731
        params, spec, jnp.asarray(TOKENS), POSITIONS, jnp.ones_like(POSITIONS), replay_LxBxTxK=replay
    )
    hidden, routing = run(params)
    assert routing.ids.shape == (3, 2, 17, 3)
    assert float(routing.tokens[0]) == TOKENS.size
    again, replayed = run(params, routing.ids)
    np.testing.assert_allclose(hidden, again, atol=1e-6)
    noisy = jax.tree.map(lambda w: w * (1 + 0.05 * jax.random.normal(jax.random.key(0), w.shape)), params)
    other, free = run(noisy)
    mask = jnp.ones(TOKENS.shape, bool)
    np.testing.assert_array_equal(free.own, free.ids)
    some, mean, total = routed_differently(free.ids, routing.ids, mask)
    assert 0 < mean < some < total == TOKENS.size
    differ = (np.sort(free.ids) != np.sort(routing.ids)).any(-1)
    assert (float(some), float(mean)) == (differ.any(0).sum(), pytest.approx(differ.mean(0).sum()))
    fixed, kept = run(noisy, routing.ids)
    np.testing.assert_array_equal(kept.ids, routing.ids)
    assert float(routed_differently(kept.own, routing.ids, mask)[0]) > 0  # what the router would have done is known
    half = jnp.where((jnp.arange(17) % 2 == 0)[None, None, :, None], routing.ids, -1)
    _, mixed = run(noisy, half)
    np.testing.assert_array_equal(mixed.ids[:, :, ::2], routing.ids[:, :, ::2])
    np.testing.assert_array_equal(mixed.ids[:, :, 1::2], mixed.own[:, :, 1::2])
    assert float(jnp.abs(fixed - hidden).mean()) < float(jnp.abs(other - hidden).mean())


@pytest.mark.quick
def test_a_gpu_multiplies_groups_by_a_kernel_or_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, w, sizes = jnp.ones((4, 3)), jnp.ones((2, 3, 5)), jnp.array([1, 3], jnp.int32)
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(UserError, match=r"pip install 'envace_jax\[cuda\]'"):
        grouped_matmul(x, w, sizes)
    asked = []

    def ragged_dot(lhs, rhs, *, group_sizes, implementation):
        asked.append(implementation)
        return jax.lax.ragged_dot(lhs, rhs, group_sizes)

    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(ragged_dot=ragged_dot))
    np.testing.assert_allclose(grouped_matmul(x, w, sizes), 3.0)
    assert asked == [("mosaic", "triton")]  # without "xla", the dense product


@pytest.mark.quick
def test_padding_stays_out_of_the_figures():
    x, router, experts = layer_inputs()
    valid = jnp.zeros(x.shape[:2], bool).at[:2].set(True)
    _, all_of_two = moe_mlp(SPEC, x[:2], router, experts)
    _, masked = moe_mlp(SPEC, x, router, experts, valid_BxT=valid)
    np.testing.assert_allclose(masked.counts, all_of_two.counts)
    np.testing.assert_allclose(masked.mass, all_of_two.mass, rtol=1e-5)
    uniform = masked._replace(counts=jnp.ones(8) * 3, mass=jnp.ones(8), tokens=jnp.float32(8))
    np.testing.assert_allclose(balance_loss(SPEC, uniform), SPEC.n_experts_per_token, rtol=1e-6)
