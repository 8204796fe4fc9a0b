"""Every form of attention that runs here against the reference, packed against unpacked, forward and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.config import UserError
from envace_jax.model import attention as attention_module
from envace_jax.model.attention import attention, choose
from envace_jax.model.sharding import Rules, make_mesh

T, H, K, D = 256, 4, 2, 128  # the Pallas kernel wants rows of 128 and heads of 128
LENGTHS = (100, 37, 90)  # the rest of the row is padding


def packed_row(seed: int = 0):
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (jax.random.normal(key, (1, T, n, D)) for key, n in zip(keys, (H, K, K)))
    segments = np.repeat([*range(1, len(LENGTHS) + 1), 0], [*LENGTHS, T - sum(LENGTHS)])
    positions = np.concatenate([np.arange(n) for n in (*LENGTHS, T - sum(LENGTHS))])
    return q, k, v, jnp.asarray(positions)[None], jnp.asarray(segments)[None]


def one_by_one(q, k, v):
    """Each segment as a row of its own, by the textbook formula."""
    out, start = [], 0
    for n in LENGTHS:
        span = slice(start, start + n)
        qs, ks, vs = q[0, span], jnp.repeat(k[0, span], H // K, 1), jnp.repeat(v[0, span], H // K, 1)
        scores = jnp.einsum("thd,shd->hts", qs, ks) / np.sqrt(D)
        scores = jnp.where(np.tril(np.ones((n, n), bool)), scores, -jnp.inf)
        out.append(jnp.einsum("hts,shd->thd", jax.nn.softmax(scores, -1), vs))
        start += n
    return jnp.concatenate(out)


@pytest.mark.parametrize("backend", ["xla", "chunked", "splash"])
def test_packed_equals_unpacked(backend, monkeypatch):
    monkeypatch.setattr(attention_module, "CHUNK", 96)  # several slices, the last one not full
    q, k, v, positions, segments = packed_row()
    weight = jax.random.normal(jax.random.key(5), (sum(LENGTHS), H, D))

    def ours(q, k, v):
        out = attention(q, k, v, positions_BxT=positions, segments_BxT=segments, backend=backend, interpret=True)
        return jnp.sum(out[0, : sum(LENGTHS)] * weight), out[0, : sum(LENGTHS)]

    def plain(q, k, v):
        out = one_by_one(q, k, v)
        return jnp.sum(out * weight), out

    run = lambda f: jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(q, k, v)  # noqa: E731
    ((_, got), grads), ((_, want), want_grads) = run(ours), run(plain)
    np.testing.assert_allclose(got, want, atol=1e-5)
    for a, b in zip(grads, want_grads):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.quick
def test_shards_of_batch_heads_and_sequence_equal_one_device(monkeypatch):
    monkeypatch.setattr(attention_module, "CHUNK", 16)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (4, 64, n, 8)) for key, n in zip(keys, (H, K, K)))
    segments = jnp.asarray(np.repeat([[1, 2, 0]], 4, 0).repeat([30, 30, 4], axis=1))
    positions = jnp.broadcast_to(jnp.arange(64), (4, 64))
    places = dict(positions_BxT=positions, segments_BxT=segments)
    want = attention(q, k, v, **places)
    for rules, backend in [(Rules(), "xla"), (Rules(batch="replica", sequence="fsdp"), "chunked")]:
        with jax.set_mesh(make_mesh(replica=2, fsdp=2, tensor=2)):
            place = lambda x, *axes: jax.device_put(x, rules.spec(*axes))  # noqa: B023, E731
            heads = place(q, "batch", "sequence", "heads", None), *(
                place(x, "batch", "sequence", "kv_heads", None) for x in (k, v)
            )
            rows = {name: place(x, "batch", "sequence") for name, x in places.items()}
            got = jax.jit(lambda q, k, v, rows: attention(q, k, v, **rows, rules=rules, backend=backend))(*heads, rows)  # noqa: B023
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.quick
def test_what_a_form_cannot_do_is_said():
    q, k, v, positions, segments = packed_row()
    places = dict(positions_BxT=positions[:, :100], segments_BxT=segments[:, :100])
    with pytest.raises(UserError, match="multiple of 128"):
        attention(q[:, :100], k[:, :100], v[:, :100], **places, backend="splash")
    with pytest.raises(UserError, match="'flash' is unknown"):
        attention(q, k, v, positions_BxT=positions, segments_BxT=segments, backend="flash")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("length", "head_dim", "dtype", "platform", "want"),
    [
        (20_480, 128, jnp.bfloat16, "tpu", "splash"),
        (20_500, 128, jnp.bfloat16, "tpu", "chunked"),  # no multiple of 128
        (20_480, 64, jnp.bfloat16, "tpu", "chunked"),
        (20_480, 128, jnp.bfloat16, "gpu", "cudnn"),
        (20_480, 128, jnp.float32, "gpu", "chunked"),
        (20_480, 128, jnp.bfloat16, "cpu", "chunked"),
        (2_048, 128, jnp.bfloat16, "cpu", "xla"),
    ],
)
def test_what_auto_means(length, head_dim, dtype, platform, want):
    assert choose("auto", length, head_dim, dtype, platform) == want
    assert choose("xla", length, head_dim, dtype, platform) == "xla"
