"""
A random Hugging Face folder is fine-tuned on conversations and exported. transformers, run, the
page and, where it is installed, llama.cpp then answer with the same tokens.
"""
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch
from transformers import (AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM,
                          Qwen2Config, Qwen2ForCausalLM)

import llamac
from engine.training import load
from page import talk
from page.server import Server
from tests import forked
from tests.test_architectures import LLAMA3
from tests.test_chat import oracle_and_model, told
from tests.test_conversations import messages_of, some_conversations, train, write_lines
from tests.test_run import run
from tests.test_train import environment

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("library")
SHAPE = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1)
MODELS = {
    "Qwen2.5": (
        "<|im_end|>",
        lambda **how: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True, **how))),
    "Llama 3": ("<|eot_id|>",
                lambda **how: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3, **how)))
}
MAX_ANSWER = 40


def imported_folder(tmp_path, name):
    """Write a random model in Hugging Face's format and its chat template; return the folder."""
    stop, make = MODELS[name]
    tokenizer, _ = oracle_and_model(tmp_path, name)
    folder, stop = tmp_path / "hf", tokenizer.convert_tokens_to_ids(stop)
    torch.manual_seed(1)
    model = make(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=stop)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def by_transformers(folder, conversations):
    """
    Return (tokenizer, [(prompt's tokens, answer's tokens)]), decoded greedily from the folder that
    export.py wrote.
    """
    model, tokenizer, found = (AutoModelForCausalLM.from_pretrained(folder),
                               AutoTokenizer.from_pretrained(folder), [])
    for messages in conversations:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                               return_tensors="pt", return_dict=True)
        out = model.generate(**prompt, max_length=prompt["input_ids"].shape[1] + MAX_ANSWER,
                             do_sample=False)
        length = prompt["input_ids"].shape[1]
        found.append((out[0, :length].tolist(), out[0, length:].tolist()))
    return tokenizer, found


def by_page(file, conversations):
    """Return [(text, number of prompt tokens, of answer tokens)] of the page's chat completions."""
    served = Server("127.0.0.1", 0, talk.Talk(lambda: {"m": file}).routes())
    threading.Thread(target=served.serve_forever, daemon=True).start()
    try:
        with openai.OpenAI(base_url=served.url().split("/?")[0] + "/v1", api_key=served.token,
                           max_retries=0, timeout=60) as client:
            told = [client.chat.completions.create(model="m", messages=messages, temperature=0,
                                                   max_tokens=MAX_ANSWER)
                    for messages in conversations]
    finally:
        served.shutdown()
        served.server_close()
    return [(one.choices[0].message.content, one.usage.prompt_tokens, one.usage.completion_tokens)
            for one in told]


def by_llama_cpp(file, prompts, stop):
    """Return the tokens of llama.cpp's greedy answers to prompts of tokens."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(file), n_ctx=512, verbose=False)
    found = []
    for prompt in prompts:
        model.reset()
        answer = []
        for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            answer.append(token)
            if token == stop or len(answer) == MAX_ANSWER:
                break
        found.append(answer)
    return found


@pytest.fixture(scope="module", params=[pytest.param("Qwen2.5", marks=pytest.mark.slow), "Llama 3"])
def tuned(request, tmp_path_factory):
    """
    Fine-tune and export a folder. Return the file, questions to it, and the answers of
    transformers.
    """
    tmp_path = tmp_path_factory.mktemp("imported")
    folder = imported_folder(tmp_path, request.param)
    learned = some_conversations(40)
    write_lines(tmp_path / "chats.jsonl", [messages_of(turns) for turns in learned])
    # float32 trains the same model on every machine.
    done = train(tmp_path, "--data=chats.jsonl", f"--init_from={folder}", "--out_dir=out",
                 "--max_iters=120", "--batch_size=2", "--checks=none", "--learning_rate=1e-2",
                 "--eval_interval=120", "--device=cpu", "--max_seq_len=384", "--eval_iters=1",
                 "--log_interval=20", "--dtype=float32")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    first, last = (row["loss/train"] for row in (rows[1], rows[-1]))
    assert math.isfinite(last) and last < first / 2  # the model has learned something to say
    done = forked.run([str(ROOT / "export.py"), "out", "--format=hf"], tmp_path, environment())
    assert done.returncode == 0, done.stderr
    # Some conversations have a system prompt, and some have several turns of the user.
    asked = [messages_of(turns[:-1])["messages"] for turns in learned[:12]]
    tokenizer, expected = by_transformers(tmp_path / "out/hf", asked)
    assert len({str(answer) for _, answer in expected}) > 3
    stop = tokenizer.convert_tokens_to_ids(MODELS[request.param][0])
    assert all(answer[-1] == stop for _, answer in expected)
    texts = [tokenizer.decode(answer[:-1]) for _, answer in expected]
    return SimpleNamespace(file=tmp_path / "out/model.gguf", asked=asked, tokens=expected,
                           texts=texts, stop=stop)


def test_the_page_answers_as_transformers_does(tuned):
    for found, (prompt, answer), text in zip(by_page(tuned.file, tuned.asked), tuned.tokens,
                                             tuned.texts):
        assert found == (text, len(prompt), len(answer) - 1)


def test_run_answers_as_transformers_does(tuned, run_bin):
    model, vocabulary = llamac.Model(tuned.file), load.read_model(tuned.file)[2]
    model.use_template()
    singles = 0
    for messages, (prompt, answer), text in zip(tuned.asked, tuned.tokens, tuned.texts):
        assert [int(i) for i in told(model, messages)] == prompt
        assert vocabulary.encode_inside(text) == answer[:-1]
        if [message["role"] for message in messages if message["role"] != "system"] == ["user"]:
            # Without -y, run uses the template's own system prompt.
            system = ["-y", messages[0]["content"]] if len(messages) > 1 else []
            out = run(run_bin, tuned.file, "-m", "chat", "-t", 0, "-n", 0, "--raw", *system, "-i",
                      messages[-1]["content"])
            assert f"Assistant: {text}\n" in out.decode()
            singles += 1
    assert singles


def test_llama_cpp_answers_as_transformers_does(tuned):
    prompts = [prompt for prompt, _ in tuned.tokens]
    assert by_llama_cpp(tuned.file, prompts, tuned.stop) == [answer for _, answer in tuned.tokens]
