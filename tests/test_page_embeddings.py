"""
Test the page's embeddings through OpenAI's client: they equal those of the library, in both
encodings, also while texts are generated.
"""
import base64
import os
import subprocess
import sys
import threading

import httpx
import numpy as np
import openai
import pytest

import llamac
from page.embeddings import Embeddings, unit_length
from page.server import Server
from page.talk import Talk
from tests.conftest import ROOT
from tests.test_run import Model
from tests.test_talk import PAGE

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    Model(seq=64, seed=3).write_gguf(folder / "plain.gguf")
    broken = Model()
    broken.w["norm"][0] = np.nan
    broken.write_gguf(folder / "broken.gguf")
    return folder


@pytest.fixture(scope="module")
def server(folder, library):
    talk = Talk(lambda: {path.stem: path for path in folder.iterdir()})
    served = Server("127.0.0.1", 0, talk.routes() | Embeddings(talk).routes())
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield served
    served.shutdown()
    served.server_close()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url().split("/?")[0] + "/v1", api_key=server.token,
                       max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder):
    """Return a function that returns the embedding of a text or of tokens, with length 1."""
    engine = llamac.Engine(llamac.Model(folder / "plain.gguf"))

    def embed(text):
        embedding = engine.embed(text)
        return embedding / np.linalg.norm(embedding)

    return embed


def test_embeddings_are_the_librarys(client, expected):
    """Embed one text, several, and tokens. Without encoding_format, the client asks for base64."""
    tokens = [1, 68, 70]
    for given, texts in (("One", ["One"]), (["One", "Two and three"], ["One", "Two and three"]),
                         (tokens, [tokens]), ([tokens, [5]], [tokens, [5]])):
        for how in {}, {"encoding_format": "float"}, {"encoding_format": "base64"}:
            found = client.embeddings.create(model="plain", input=given, **how)
            assert found.object == "list"
            assert found.model == "plain"
            assert [d.index for d in found.data] == [*range(len(texts))]
            for data, text in zip(found.data, texts):
                assert data.object == "embedding"
                numbers = (np.frombuffer(base64.b64decode(data.embedding), "<f4")
                           if isinstance(data.embedding, str) else np.float32(data.embedding))
                assert (numbers == expected(text)).all() and abs(np.linalg.norm(numbers) - 1) < 1e-6
    usage = client.embeddings.create(model="plain", input=["One", "A"], user="me").usage
    assert (usage.prompt_tokens, usage.total_tokens) == (6, 6)
    assert unit_length(np.float32([3, 0, 4])).tolist() == np.float32([0.6, 0, 0.8]).tolist()
    assert unit_length(np.zeros(2)).tolist() == [0, 0]


def test_mistakes_are_reported_in_openais_format(client, server):
    def wrong(kind, words, **how):
        with pytest.raises(kind, match=words) as caught:
            client.embeddings.create(**{"model": "plain", "input": "A"} | how)
        return caught.value

    refused = openai.BadRequestError
    assert wrong(openai.NotFoundError, "there is no model", model="none").code == "model_not_found"
    for value in (None, [], {}, 5, [["A"]], [1, "A"], [300], [-1], [1.5], [True], ["A", [1]],
                  [[1], []]):
        assert wrong(refused, "input: expected a text", input=value).param == "input"
    for value in "", ["A", ""]:
        assert wrong(refused, "input: a text is empty", input=value).param == "input"
    assert (wrong(refused, "the model's context is 64", input="A" * 64).code
            == "context_length_exceeded")
    assert wrong(refused, "2049 texts, expected at most 2048", input=["A"] * 2049).param == "input"
    for value in "hex", 5:
        assert (wrong(refused, "encoding_format is", encoding_format=value).param
                == "encoding_format")
    for name, value in ("dimensions", 8), ("prompt", "A"), ("pooling", "last"):
        error = wrong(refused, f"'{name}' is not a supported field", extra_body={name: value})
        assert error.param == name and error.code == "unknown_parameter"
    assert (wrong(openai.InternalServerError, "not finite", model="broken").body["type"]
            == "server_error")
    url, head = f"{client.base_url}embeddings", {"Authorization": f"Bearer {server.token}"}
    for body in (b"", b"[]", b"{", b"[" * 100000,
                 b'{"model": "plain", "input": ' + b"[" * 900 + b"]" * 900 + b"}"):
        answer = httpx.post(url, content=body, headers=head)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error", answer.text
    assert httpx.post(url, content=b'{"model": "plain", "input": "\\ud800"}',
                      headers=head).status_code == 200
    assert httpx.post(url, json={"model": "plain", "input": "A"}).status_code == 403  # no token
    assert client.embeddings.create(model="plain", input="A", extra_body={"dimensions": None}).data


def test_embeddings_and_texts_do_not_disturb_each_other(client, expected):
    """
    Some clients ask for embeddings of long lists while others generate texts: each receives the
    same as alone, and the lists do not hold up the texts.
    """
    def say(seed):
        return client.completions.create(model="plain", prompt="A", max_tokens=100,
                                         seed=seed).choices[0].text

    texts, alone, found = (["A" * (1 + n % 60) for n in range(300)],
                           [say(seed) for seed in range(4)], {})
    ended = {}

    def embed(n):
        found[n] = [data.embedding
                    for data in client.embeddings.create(model="plain", input=texts).data]
        ended[n] = len(ended)

    def write(n):
        found[n] = say(n)
        ended[n] = len(ended)

    threads = [threading.Thread(target=work, args=(n,))
               for n in range(8) for work in [write if n < 4 else embed]]
    for thread in threads[4:] + threads[:4]:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(4)] == alone
    assert max(ended[n] for n in range(4)) < 4  # all texts end before the lists, which take longer
    rows = np.float32([expected(text) for text in texts])
    assert all((np.float32(found[n]) == rows).all() for n in range(4, 8))


def test_a_client_that_leaves_ends_its_list(client, server, folder):
    """The server skips the texts that are left, so the next request does not wait for them."""
    url, head = f"{client.base_url}embeddings", {"Authorization": f"Bearer {server.token}"}
    counted, engine = ([], server.routes["POST /v1/embeddings"].__self__.talk.load("plain")
                       .sequence_cache().engine)
    embed = engine.embed
    engine.embed = lambda tokens: counted.append(len(tokens)) or embed(tokens)
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json={"model": "plain", "input": ["A" * 60] * 2048}, headers=head,
                       timeout=httpx.Timeout(5, read=0.2))
        assert client.embeddings.create(model="plain", input="One").data and 1 < len(counted) < 2000
    finally:
        del engine.embed


def test_embeddings_are_served_without_the_page(tmp_path, library, folder, expected):
    page = subprocess.Popen(
        [sys.executable, "-c", PAGE, "--port=0", f"--serve={folder / 'plain.gguf'}", library],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)})
    _, address, *_, key, _, _, _, name = page.stdout.readline().split()
    with openai.OpenAI(base_url=address, api_key=key, max_retries=0, timeout=60) as client:
        assert (np.float32(client.embeddings.create(model=name, input="One").data[0].embedding)
                == expected("One")).all()
    page.terminate()
    assert page.communicate(timeout=20) == ("the API has ended\n", "") and page.returncode == 0
