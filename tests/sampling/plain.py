"""A plain decoder to compare the engine with: one row, no cache, the whole row computed anew for every token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from envace_jax.model import qwen3
from envace_jax.model.spec import Qwen3Spec
from envace_jax.sampling.sampler import position_uniforms, request_key, sample

SPEC = Qwen3Spec(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    rope_theta=1e4,
    tie_embeddings=False,
)


def make_params(seed: int = 0):
    """Random weights large enough that attention matters and outputs are neither flat nor sure."""
    params = qwen3.init_params(SPEC, jax.random.key(seed))
    layers = {k: w * 8 if w.ndim > 2 else w for k, w in params["layers"].items()}
    return params | {"layers": layers, "embed": params["embed"] * 10, "lm_head": params["lm_head"] * 15}


@jax.jit
def row_logits(params, ids_T):
    """Logits [T, V] of one row by the learner's forward pass."""
    t = ids_T.shape[0]
    hidden = qwen3.forward(params, SPEC, ids_T[None], jnp.arange(t)[None], jnp.ones((1, t), jnp.int32))
    return qwen3.unembed(params, hidden[0], qwen3.ForwardOptions())


def row_logprobs(params, ids, start: int, temperature: float = 1.0, length: int = 128):
    """Log-probabilities of `ids[start:]`, each given what comes before it."""
    padded = jnp.zeros(length, jnp.int32).at[: len(ids)].set(jnp.asarray(ids))
    logp = jax.nn.log_softmax(row_logits(params, padded) / (temperature or 1.0), -1)
    at = np.arange(start, len(ids))
    return np.asarray(logp)[at - 1, np.asarray(ids)[at]]


@jax.jit
def _pick(logits_V, key_2, position, temperature, top_p, top_k):
    uniform_1 = position_uniforms(key_2[None], position[None], 1)[:, 0]
    token, logp = sample(logits_V[None], uniform_1, temperature[None], top_p[None], top_k[None])
    return token[0], logp[0]


def plain_decode(params, request, seed: int, max_length: int, length: int = 128):
    """(ids, log-probabilities, finish) of one request."""
    ids, start = list(request.prompt_ids), len(request.prompt_ids)
    key, p, logps = jnp.asarray(request_key(seed, request.key)), request.params, []
    while True:
        padded = jnp.zeros(length, jnp.int32).at[: len(ids)].set(jnp.asarray(ids))
        logits = row_logits(params, padded)[len(ids) - 1]
        token, logp = _pick(
            logits,
            key,
            jnp.int32(len(ids) - 1),
            jnp.float32(p.temperature),
            jnp.float32(p.top_p),
            jnp.int32(p.top_k),
        )
        ids.append(int(token))
        logps.append(float(logp))
        if ids[-1] in p.stop_ids:
            return ids[start:], logps, "stop"
        if len(ids) - start >= p.max_tokens or len(ids) >= max_length:
            return ids[start:], logps, "length"
