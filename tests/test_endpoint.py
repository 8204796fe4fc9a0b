"""The endpoint client against a loopback server that misbehaves in every way we know."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from envace_jax.config import UserError
from envace_jax.endpoint import MALFORMED, OUTAGE, REFUSED, REJECTED, TIMEOUT, Endpoint, EndpointSettings

pytestmark = pytest.mark.quick
MESSAGES = [{"role": "user", "content": "?"}]


def body(content: object, finish: str = "stop") -> str:
    message = {"role": "assistant", "content": content}
    return json.dumps(
        {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        }
    )


def open_endpoint(server: HTTPServer, **settings: object) -> Endpoint:
    defaults = dict(attempts=3, timeout=2.0, deadline=6.0)
    return Endpoint(EndpointSettings(server.url_for("/v1"), "m", **{**defaults, **settings}))  # type: ignore[arg-type]


def answer_with(server: HTTPServer, *responses: Response) -> list[dict]:
    """Serves the responses in turn (the last one for ever) and returns the bodies that were asked."""
    left, asked, lock = list(responses), [], threading.Lock()

    def handler(request: Request) -> Response:
        with lock:
            asked.append(json.loads(request.data))
            return left.pop(0) if len(left) > 1 else left[0]

    server.expect_request("/v1/chat/completions").respond_with_handler(handler)
    return asked


def ok(content: object = "yes", **kwargs: str) -> Response:
    return Response(body(content, **kwargs), content_type="application/json")


def test_an_answer_carries_text_and_usage(httpserver: HTTPServer) -> None:
    asked = answer_with(httpserver, ok())
    with open_endpoint(httpserver) as e:
        done = e.complete(MESSAGES, temperature=0.1)
    assert (done.text, done.cause, done.prompt_tokens, done.completion_tokens) == ("yes", None, 3, 2)
    assert asked[0]["temperature"] == 0.1 and asked[0]["top_p"] == 0.8


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (Response("busy", status=429, headers={"Retry-After": "0.05"}), OUTAGE),
        (Response("broken", status=500), OUTAGE),
        (Response('{"choices": [{"mess', content_type="application/json"), MALFORMED),
        (Response("[]", content_type="application/json"), MALFORMED),
        (Response('{"choices": []}', content_type="application/json"), MALFORMED),
        (Response("<html>", content_type="text/html"), MALFORMED),
        (ok(None), MALFORMED),
        (ok(17), MALFORMED),
    ],
)
def test_a_passing_fault_is_retried_and_a_lasting_one_is_named(
    httpserver: HTTPServer, bad: Response, cause: str
) -> None:
    answer_with(httpserver, bad, ok())
    with open_endpoint(httpserver) as e:
        done = e.complete(MESSAGES)
        assert (done.text, done.attempts) == ("yes", 2)
    httpserver.clear()
    answer_with(httpserver, bad)
    with open_endpoint(httpserver, attempts=2) as e:
        done = e.complete(MESSAGES)
        assert (done.text, done.cause, done.attempts) == (None, cause, 2)
        assert e.stats()[f"failed_{cause}"] == 1


def test_refusals_and_wrong_requests_are_not_retried(httpserver: HTTPServer) -> None:
    asked = answer_with(httpserver, ok("no", finish="content_filter"))
    with open_endpoint(httpserver) as e:
        assert e.complete(MESSAGES).cause == REFUSED
    assert len(asked) == 1
    httpserver.clear()
    asked = answer_with(httpserver, Response('{"error": {"message": "no such model"}}', status=404))
    with open_endpoint(httpserver) as e:
        assert e.complete(MESSAGES).cause == REJECTED
    assert len(asked) == 1


def test_json_that_was_asked_for_and_did_not_come_is_malformed(httpserver: HTTPServer) -> None:
    answer_with(httpserver, ok("true, I would say"), ok('{"answer": true}'))
    with open_endpoint(httpserver) as e:
        done = e.complete(MESSAGES, schema={"type": "object"})
    assert done.text == '{"answer": true}' and done.attempts == 2


def test_tokens_of_malformed_attempts_are_counted(httpserver: HTTPServer) -> None:
    """3 + 2 tokens an answer: two that do not hold and one that does; and where none does."""
    answer_with(httpserver, ok("one"), ok("two"), ok("three"))
    with open_endpoint(httpserver) as e:
        done = e.complete(MESSAGES, check=lambda text: None if text == "three" else "wrong")
        assert (done.text, done.attempts, done.prompt_tokens, done.completion_tokens) == ("three", 3, 9, 6)
        assert (e.stats()["prompt_tokens"], e.stats()["completion_tokens"]) == (9, 6)
        lost = e.complete(MESSAGES, check=lambda text: "wrong")
        assert (lost.text, lost.cause, lost.prompt_tokens, lost.completion_tokens) == (None, MALFORMED, 9, 6)


def test_a_server_that_never_answers_ends_at_the_deadline(httpserver: HTTPServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with Endpoint(EndpointSettings(url, "m", attempts=9, timeout=0.2, deadline=0.5)) as e:
            done = e.complete(MESSAGES)
    assert done.cause == TIMEOUT and done.text is None and done.seconds < 5


def test_no_server_at_all_is_an_outage() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    with Endpoint(EndpointSettings(f"http://127.0.0.1:{port}/v1", "m", attempts=1)) as e:
        assert e.complete(MESSAGES).cause == OUTAGE


def test_concurrency_stays_within_its_limit() -> None:
    """Against a server that would answer all twenty at once."""
    live, most, lock = 0, 0, threading.Lock()

    def handler(_: Request) -> Response:
        nonlocal live, most
        with lock:
            live += 1
            most = max(most, live)
        time.sleep(0.02)
        with lock:
            live -= 1
        return ok()

    with HTTPServer(threaded=True) as server:
        server.expect_request("/v1/chat/completions").respond_with_handler(handler)
        with open_endpoint(server, concurrency=3) as e:
            futures = [e.submit(MESSAGES) for _ in range(20)]
            assert all(f.result().text == "yes" for f in futures)
    assert 1 < most <= 3


def test_requests_side_by_side_keep_their_own_arguments() -> None:
    """Two endpoints, ten requests each under way at once, made from one list that the caller goes on changing: every
    answer repeats what its own request asked for, and of which model."""

    def handler(request: Request) -> Response:
        asked = json.loads(request.data)
        time.sleep(0.02)
        return ok(json.dumps([asked["model"], asked["messages"][0]["content"], asked["temperature"]]))

    with HTTPServer(threaded=True) as server:
        server.expect_request("/v1/chat/completions").respond_with_handler(handler)
        url, messages, futures = server.url_for("/v1"), [{"role": "user", "content": ""}], []
        with Endpoint(EndpointSettings(url, "one")) as one, Endpoint(EndpointSettings(url, "two")) as two:
            for k in range(10):
                for endpoint in (one, two):
                    messages[0]["content"] = f"{k}"
                    futures.append(endpoint.submit(messages, temperature=k / 10))
            messages[0]["content"] = "changed"
            answers = [json.loads(f.result().text or "") for f in futures]
    assert answers == [[name, f"{k}", k / 10] for k in range(10) for name in ("one", "two")]


def test_the_cache_answers_equal_requests_and_survives_damage(httpserver: HTTPServer, tmp_path) -> None:
    asked = answer_with(httpserver, ok())
    with open_endpoint(httpserver, cache_dir=str(tmp_path)) as e:
        assert not e.complete(MESSAGES).cached
        assert e.complete(MESSAGES).cached
        e.complete(MESSAGES, temperature=0.0)
        assert len(asked) == 2 and e.stats()["cache_hits"] == 1
        for file in tmp_path.rglob("*.json"):
            file.write_text('{"text": 3')
        assert e.complete(MESSAGES).text == "yes"
    assert len(asked) == 3


def test_the_key_comes_from_the_environment_and_is_not_kept(
    httpserver: HTTPServer, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "canary-5150")
    seen: list[str] = []

    def handler(request: Request) -> Response:
        seen.append(request.headers["Authorization"])
        return Response("no", status=401)

    httpserver.expect_request("/v1/chat/completions").respond_with_handler(handler)
    with open_endpoint(httpserver, api_key_env="JUDGE_KEY", cache_dir=str(tmp_path)) as e:
        done = e.complete(MESSAGES)
        assert "canary" not in repr(done) + repr(e.settings) + json.dumps(e.stats())
    assert seen == ["Bearer canary-5150"]
    assert not any("canary" in f.read_text() for f in tmp_path.rglob("*") if f.is_file())


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match="base_url"):
        EndpointSettings("localhost:80", "m")
    with pytest.raises(UserError, match="model"):
        EndpointSettings("http://localhost", "")


class Counted:
    """Stands in for the client: answers at once and notes when it was asked."""

    def __init__(self) -> None:
        self.chat, self.completions, self.times = self, self, []

    async def create(self, **body: object) -> object:
        self.times.append(time.monotonic())
        message = type("Message", (), {"content": "yes", "refusal": None})
        choice = type("Choice", (), {"message": message, "finish_reason": "stop"})
        return type("Answer", (), {"choices": [choice], "usage": None})

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("limit", [{"requests_per_minute": 60}, {"tokens_per_minute": 6000, "max_tokens": 92}])
def test_limits_by_the_minute_are_kept(limit: dict[str, int]) -> None:
    """60 requests (or 60 of 8 + 92 tokens) may go at once, then one a second: the 62nd comes 2 s after the first."""
    with Endpoint(EndpointSettings("http://127.0.0.1:1/v1", "m", concurrency=99, **limit)) as e:
        client = e._client = Counted()
        assert all(f.result().text == "yes" for f in [e.submit(MESSAGES) for _ in range(62)])
    assert len(client.times) == 62
    assert client.times[60] - client.times[0] > 0.9 and client.times[61] - client.times[0] > 1.9


def test_the_deadline_does_not_count_our_own_queue() -> None:
    """The 62nd request waits 2 s for its turn, four times its deadline, and is answered."""
    settings = EndpointSettings("http://127.0.0.1:1/v1", "m", concurrency=99, requests_per_minute=60, deadline=0.5)
    with Endpoint(settings) as e:
        e._client = Counted()
        done = [f.result() for f in [e.submit(MESSAGES) for _ in range(62)]]
    assert all(d.text == "yes" for d in done) and max(d.seconds for d in done) > 1.0


def test_retry_after_is_waited_for(httpserver: HTTPServer) -> None:
    asked = answer_with(httpserver, Response("busy", status=429, headers={"Retry-After": "1"}), ok())
    with open_endpoint(httpserver) as e:
        done = e.complete(MESSAGES)
    assert done.text == "yes" and len(asked) == 2 and done.seconds > 1.0  # without the header at most 0.5
