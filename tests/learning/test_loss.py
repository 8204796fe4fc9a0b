"""Chunked log-probabilities and the policy loss against numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.config import UserError
from envace_jax.learning.loss import LossConfig, low_variance_kl, output_mean, policy_loss, token_logprobs


def problem(seed=0, b=3, s=11, d=8, v=37):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(b, s, d)).astype(np.float32)
    head = rng.normal(size=(d, v)).astype(np.float32)
    targets = rng.integers(0, v, (b, s)).astype(np.int32)
    mask = np.arange(s)[None] < rng.integers(1, s + 1, (b, 1))
    mask[0] = False
    return hidden, head, targets, mask


def naive(hidden, head, targets, mask, temperature):
    logits = (hidden.astype(np.float64) @ head) / temperature
    logits -= logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(logp, targets[..., None], -1)[..., 0]
    return np.where(mask, picked, 0), np.where(mask, -(np.exp(logp) * logp).sum(-1), 0)


@pytest.mark.quick
@pytest.mark.parametrize("chunk", [1, 6, 9, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_logprobs(chunk, temperature):
    hidden, head, targets, mask = problem()
    got = token_logprobs(hidden, targets, mask, head, temperature=temperature, chunk_tokens=chunk)
    for a, b in zip(got, naive(hidden, head, targets, mask, temperature)):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_chunked_gradients():
    hidden, head, targets, mask = problem(1)

    def naive_sum(hidden, head):
        logp = jax.nn.log_softmax(hidden @ head / 0.7)
        entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
        picked = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(mask, jnp.sin(picked) + entropy, 0))

    def chunked_sum(hidden, head):
        logp, entropy = token_logprobs(
            hidden, targets, mask, head, temperature=0.7, chunk_tokens=7, entropy_gradient=True
        )
        return jnp.sum(jnp.where(mask, jnp.sin(logp) + entropy, 0))

    want = jax.grad(naive_sum, (0, 1))(hidden, head)
    got = jax.grad(chunked_sum, (0, 1))(hidden, head)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_memory_is_a_chunk_of_logits():
    """The naive form holds logits and their gradient for every position, the chunked one for one chunk."""
    b, s, d, v = 4, 128, 16, 4096
    shapes = [jax.ShapeDtypeStruct(x, t) for x, t in (((b, s, d), "float32"), ((b, s), "int32"), ((b, s), "bool"))]
    head = jax.ShapeDtypeStruct((d, v), "float32")

    def chunked(hidden, head, targets, mask):
        return token_logprobs(hidden, targets, mask, head, chunk_tokens=32)[0].sum()

    def naive_sum(hidden, head, targets, mask):
        logp = jax.nn.log_softmax(hidden @ head)
        return jnp.where(mask, jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], 0).sum()

    def temporaries(f):
        compiled = jax.jit(jax.grad(f, (0, 1))).lower(shapes[0], head, shapes[1], shapes[2]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(naive_sum) > 1.0 * b * s * v * 4
    assert temporaries(chunked) < 0.3 * b * s * v * 4


def batch_of(seed=0, b=3, s=12):
    rng = np.random.default_rng(seed)
    mask = np.arange(s)[None] < np.array([[s], [7], [3]])
    output = np.where(mask, np.arange(s)[None] // 4 + 1, 0).astype(np.int32)
    logp = np.where(mask, -rng.exponential(1.5, (b, s)), 0).astype(np.float32)
    noise = lambda scale: np.where(mask, logp + scale * rng.normal(size=(b, s)), 0).astype(np.float32)  # noqa: E731
    return logp, {
        "mask": mask,
        "output": output,
        "role": rng.integers(0, 2, (b, s)).astype(np.int8),
        "weights": np.where(mask, rng.uniform(0.2, 1, (b, s)), 0).astype(np.float32),
        "advantages": np.where(mask, rng.normal(size=(b, s)), 0).astype(np.float32),
        "sampler_logprobs": noise(0.5),
        "old_logprobs": noise(0.4),
        "reference_logprobs": noise(0.5),
    }


def oracle(logp, batch, c: LossConfig):
    """One prediction at a time."""
    old = logp if c.own_old else batch["old_logprobs"]
    total, kl_total, clipped = 0.0, 0.0, 0
    for b, s in zip(*np.nonzero(batch["mask"])):
        a = float(batch["advantages"][b, s])
        same = batch["output"][b] == batch["output"][b, s]
        log_ratio = (logp - old)[b, s] if c.ratio == "token" else (logp - old)[b][same].mean()
        r = float(np.exp(log_ratio))
        rc = min(max(r, 1 - c.clip_low), 1 + c.clip_high)
        term = -min(r * a, rc * a)
        clipped += rc * a < r * a
        if c.dual_clip and a < 0:
            term = min(term, -c.dual_clip * a)
        if c.importance_cap:
            term *= min(float(np.exp(old[b, s] - batch["sampler_logprobs"][b, s])), c.importance_cap)
        if c.kl_coef:
            d = float(batch["reference_logprobs"][b, s] - logp[b, s])
            kl = min(np.exp(d) - d - 1, 10.0)
            kl_total += kl
            term += c.kl_coef * kl
        if c.entropy_coef:
            term -= c.entropy_coef * 0.5
        total += term * float(batch["weights"][b, s])
    return total, kl_total, clipped


CONFIGS = {
    "plain": LossConfig(),
    "old": LossConfig(own_old=False),
    "asymmetric": LossConfig(own_old=False, clip_low=0.1, clip_high=0.4),
    "dual": LossConfig(own_old=False, dual_clip=1.2),
    "sequence": LossConfig(own_old=False, ratio="sequence", clip_low=0.05, clip_high=0.05),
    "importance": LossConfig(own_old=False, importance_cap=1.3),
    "importance_own": LossConfig(importance_cap=2.0),
    "kl": LossConfig(own_old=False, kl_coef=0.3),
    "entropy": LossConfig(entropy_coef=0.2),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", CONFIGS)
def test_policy_loss(name):
    config = CONFIGS[name]
    logp, batch = batch_of(2)
    entropy = np.where(batch["mask"], 0.5, 0).astype(np.float32)
    got, figures = policy_loss(jnp.asarray(logp), jnp.asarray(entropy), batch, config)
    total, kl, clipped = oracle(logp.astype(np.float64), batch, config)
    assert float(got) == pytest.approx(total, rel=1e-4)
    assert float(figures["sums"]["clipped"].sum()) == clipped
    assert float(figures["sums"]["tokens"].sum()) == batch["mask"].sum()
    if config.kl_coef:
        assert float(figures["sums"]["kl"].sum()) == pytest.approx(kl, rel=1e-4)
    if not config.own_old and config.ratio == "token":
        drift = np.abs(batch["old_logprobs"] - batch["sampler_logprobs"])[batch["mask"]]
        assert float(figures["sums"]["exp_drift"].sum()) == pytest.approx(np.exp(drift).sum(), rel=1e-4)
        assert float(figures["maxima"]["exp_drift"]) == pytest.approx(np.exp(drift).max(), rel=1e-4)


def test_own_old_gradient_is_the_policy_gradient():
    logp, batch = batch_of(3)
    grad = jax.grad(lambda x: policy_loss(x, jnp.zeros_like(x), batch, LossConfig())[0])(jnp.asarray(logp))
    np.testing.assert_allclose(grad, -batch["advantages"] * batch["weights"], atol=1e-6)


def test_numbers_off_the_mask_do_not_matter():
    logp, batch = batch_of(4)
    config = LossConfig(own_old=False, kl_coef=0.1, importance_cap=2.0)
    want = policy_loss(jnp.asarray(logp), jnp.zeros_like(logp), batch, config)
    noisy = {k: np.where(batch["mask"], v, v.dtype.type(7)) if k.endswith("logprobs") else v for k, v in batch.items()}
    got = policy_loss(jnp.where(batch["mask"], logp, -3.0), jnp.zeros_like(logp), noisy, config)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_kl_estimate_is_clamped():
    assert float(low_variance_kl(jnp.float32(-50.0), jnp.float32(0.0))) == 10.0
    assert np.isfinite(float(jax.grad(lambda x: low_variance_kl(x, jnp.float32(0.0)))(jnp.float32(-200.0))))


def test_output_mean():
    values = jnp.asarray([[1.0, 3.0, 5.0, 9.0]])
    assert output_mean(values, jnp.asarray([[1, 1, 2, 0]])).tolist() == [[2.0, 2.0, 5.0, 0.0]]


def test_bad_options_name_their_key():
    with pytest.raises(UserError, match="learning.ratio"):
        LossConfig(ratio="word")
    with pytest.raises(UserError, match="temperature"):
        LossConfig(temperature=0.0)
