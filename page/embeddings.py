"""Embeddings of texts through OpenAI's API: /v1/embeddings."""
import base64
import functools

import numpy as np

import llamac
from page.server import Response
from page.talk import (IGNORED_FIELDS, ApiError, Field, checked, error, prompt_tokens,
                       refuse_unknown)

MAX_INPUTS = 2048  # max texts in a request, as in OpenAI's API
FIELDS = {
    "model": None, "input": None,  # checked where they are used
    "encoding_format": Field((str,), "'float' or 'base64'", lambda s: s in ("float", "base64")),
}


class Embeddings:
    """The route. talk: a Talk, whose models and scheduler it uses."""

    def __init__(self, talk):
        self.talk = talk

    def routes(self):
        return {"POST /v1/embeddings": self.answer}

    def answer(self, request):
        """Return the embeddings or the Response of an error, in OpenAI's format."""
        try:
            body = request.json()
            loaded = self.talk.load(body.get("model"))
            refuse_unknown(body, FIELDS.keys() | IGNORED_FIELDS)
            encoding = checked(body, FIELDS, "encoding_format", "float")
            texts = input_tokens(loaded.model, body)
        except ApiError as e:
            return e.response
        # ValueError: invalid JSON. llamac.Error: a text that the tokenizer can't encode.
        except (ValueError, llamac.Error) as e:
            return ApiError(str(e)).response
        except RecursionError:
            return ApiError("the request is nested too deeply").response
        try:
            found = self.embeddings(loaded, texts, request.gone)
        except llamac.Error as e:  # too little memory, or hidden states that are not finite
            return Response(error(str(e), "server_error"), 500)
        data = [{"object": "embedding", "index": i, "embedding": encoded(embedding, encoding)}
                for i, embedding in enumerate(found)]
        size = sum(map(len, texts))
        return {"object": "list", "model": body["model"], "data": data,
                "usage": {"prompt_tokens": size, "total_tokens": size}}

    def embeddings(self, loaded, texts, gone):
        """
        Return the embeddings of texts, each (dim,) float32 with norm 1; fewer if the client leaves.
        Raises llamac.Error.

        texts: the tokens of each; gone(): returns whether the client has closed the connection.
        """
        engine = loaded.sequence_cache().engine  # the first call starts the engine
        found = []
        for tokens in texts:
            if gone():
                break
            # Each call waits for its result. Between two of them, other requests take their turn.
            embed = functools.partial(engine.embed, tokens)
            found.append(unit_length(self.talk.scheduler.call(embed)))
        return found


def input_tokens(model, body):
    """
    Return the tokens of each text of a request. Raises ApiError; llamac.Error if the tokenizer
    can't encode a text.
    """
    given = body.get("input")
    if given == "" or isinstance(given, list) and "" in given:
        raise ApiError("input: a text is empty, expected one or more characters", "input")
    texts = prompt_tokens(model, body, "input")
    if len(texts) > MAX_INPUTS:
        raise ApiError(f"input: {len(texts)} texts, expected at most {MAX_INPUTS}", "input")
    for tokens in texts:
        if len(tokens) > model.info.seq_len:
            raise ApiError(f"input: a text has {len(tokens)} tokens, the model's context is "
                           f"{model.info.seq_len}", "input", "context_length_exceeded")
    return texts


def unit_length(embedding):
    """Return an embedding scaled to norm 1; an embedding of zeros is returned unchanged."""
    length = np.linalg.norm(embedding)
    return embedding / length if length > 0 else embedding


def encoded(embedding, encoding):
    """Return an embedding as a list of numbers, or the base64 of its float32 bytes."""
    if encoding == "float":
        return embedding.tolist()
    return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
