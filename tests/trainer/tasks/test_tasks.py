"""Tasks by name: tokens in and out, datasets, tools over several turns, a user's own."""

import pickle
import random
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import LlamaConfig, PreTrainedTokenizerFast

from zeromismatch.kernels.errors import UsageError
from zeromismatch.model_recipes.models import LoadedModel
from zeromismatch.trainer.loop.records import Prompt, Task, TurnTask
from zeromismatch.trainer.tasks.catalogue import task_named
from zeromismatch.trainer.tasks.codec import ByteCodec, ChatCodec
from zeromismatch.trainer.tasks.text import answer_in

from .conftest import responded

SUM = 'gym/basic_arithmetic,{"max_terms": 2, "operators": ["+"], "allow_parentheses": false}'


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encoded(text: str) -> tuple[int, ...]:
    return tuple(3 + value for value in text.encode())


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """Tasks look at a model's vocabulary and tokenizer, never at its weights."""
    config = LlamaConfig(vocab_size=3011)
    return LoadedModel(spec="tiny:llama", module=nn.Identity(), tokenizer=None, config=config)


@pytest.fixture(scope="module")
def chat() -> ChatCodec:
    """A byte-level tokenizer without merges, with SmolLM2's way of writing a chat."""
    letters = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    core = Tokenizer(BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHAT
    return ChatCodec(tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["even", SUM, "tool/basic_arithmetic"])
def test_a_prompt_depends_on_seed_and_index_alone(model: LoadedModel, name: str):
    task = task_named(name, model)
    again = pickle.loads(pickle.dumps(task_named(name, model)))
    prompts = [task.prompt(index, random.Random(f"0/{index}")) for index in (0, 7)]
    assert prompts == [again.prompt(index, random.Random(f"0/{index}")) for index in (0, 7)]
    assert prompts[0] != prompts[1]
    assert isinstance(task, Task)
    assert task.name == name
    assert all(0 <= token < model.config.vocab_size for token in prompts[0].tokens)


def test_even_counts_even_ids_of_all_turns(model: LoadedModel):
    task = task_named("even", model)
    prompt = Prompt(tokens=(4, 6))
    assert task.score(responded(prompt, (8, 9), (10, 13), replies=[(2, 2, 2)])) == 0.5


def test_a_datasets_own_score_is_the_reward(model: LoadedModel):
    task = task_named(SUM, model)
    prompt = task.prompt(3, random.Random(0))
    numbers = re.findall(r"\d+", ByteCodec().decode(prompt.tokens))
    answer = str(sum(map(int, numbers)))
    right_one = responded(prompt, (*encoded(answer), 2))
    assert task.score(right_one) == 1.0
    assert task.score(responded(prompt, encoded(f"<answer> {answer} </answer> so"))) == 1.0
    assert task.score(responded(prompt, (3000, 3001))) < 0.1


def test_another_seed_asks_other_questions(model: LoadedModel):
    asked = [task_named(SUM, model, seed=s).prompt(0, random.Random(0)) for s in (0, 1)]
    assert asked[0].tokens != asked[1].tokens


def test_a_tool_answers_a_turn_with_what_the_code_prints(model: LoadedModel):
    task, codec = task_named("tool/basic_arithmetic", model), ByteCodec()
    assert isinstance(task, TurnTask)
    prompt = task.prompt(0, random.Random(0))
    turn = encoded("I compute: <python>print(6 * 7)</python>")
    reply = task.next_turn(responded(prompt, turn))
    assert reply is not None
    assert codec.decode(reply) == "\n<output>\n42\n</output>\n"
    assert reply[0] == 2  # the turn ran out of room: its end is said for it
    stopped = task.next_turn(responded(prompt, (*turn, 2)))
    assert stopped == reply[1:]
    answer = encoded("<answer>42</answer>")
    assert task.next_turn(responded(prompt, turn, answer, replies=[reply])) is None
    assert task.next_turn(responded(prompt, encoded("no code"))) is None


def test_bytes_that_are_no_text_are_replaced():
    codec = ByteCodec()
    text = "Σ = 3"
    assert codec.decode(encoded(text)) == text
    assert codec.decode((3 + 0xC3, 1000, 3 + ord("a"), 2)) == "��a"
    assert codec.prompt("q", "s")[0] == 1


def test_a_chat_goes_on_where_the_model_stopped(chat: ChatCodec):
    (end,) = chat.stop_ids
    asked = chat.tokenizer.decode(list(chat.prompt("2 + 3?", "Be brief.")))
    assert asked == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    after_a_stop = chat.reply("Sure?", stopped=True)
    said = chat.tokenizer.decode(list(after_a_stop))
    assert said == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.reply("Sure?", stopped=False) == (end, *after_a_stop)
    assert chat.decode((*chat.tokenizer.encode("5"), end)) == "5"
    again = pickle.loads(pickle.dumps(chat))
    assert again.reply("Sure?", stopped=True) == after_a_stop


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [("boxnet", encoded("42")), ("prime_factorization", (*encoded("x"), 3000))],
)
def test_an_answer_that_a_dataset_cannot_read_is_worth_nothing(
    model: LoadedModel, dataset: str, answer: tuple[int, ...]
):
    task = task_named(f"gym/{dataset}", model)
    prompt = task.prompt(0, random.Random(0))
    assert task.score(responded(prompt, answer)) == 0.0


def test_the_last_answer_in_tags_counts():
    assert answer_in("<answer>1</answer> no, <answer> 2\n</answer>") == "2"
    assert answer_in(" 3 \n") == "3"


USER = """
from zeromismatch.trainer.loop.records import Prompt
from zeromismatch.trainer.tasks.text import Question

class Sums:
    def ask(self, index, rng):
        return Question(text=f"{index} + 1", data={"answer": index + 1})
    def grade(self, answer, data):
        return float(answer == str(data["answer"]))

class Ones:
    name = "ones"
    def prompt(self, index, rng):
        return Prompt(tokens=(5, rng.randrange(10)))
    def score(self, trajectory):
        return float(trajectory.tokens[-1] == 1)

def sums(codec):
    return Sums()

def ones(codec):
    return Ones()

def nothing(codec):
    return 3
"""


@pytest.fixture
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"users_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    return name


def test_a_users_questions_become_a_task(model: LoadedModel, users_folder: str):
    task = task_named(f"{users_folder}:sums", model)
    again = pickle.loads(pickle.dumps(task))
    for each in (task, again):
        prompt = each.prompt(4, random.Random(0))
        assert ByteCodec().decode(prompt.tokens) == "\ufffd4 + 1\n"
        assert each.score(responded(prompt, encoded("5"))) == 1.0
        assert each.next_turn(responded(prompt, (5,))) is None


def test_a_users_task_in_tokens_is_taken_as_it_is(model: LoadedModel, users_folder: str):
    task = task_named(f"{users_folder}:ones", model)
    assert task.prompt(0, random.Random(3)).tokens[0] == 5
    assert task.score(responded(Prompt(tokens=(5,)), (7, 1))) == 1.0


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("evn", "give `even`, `gym/DATASET`"),
        ("gym/basic_arithmetik", "near it: basic_arithmetic"),
        ('gym/basic_arithmetic,{"max_terms": -3}', "refuses"),
        ('gym/basic_arithmetic,{"colour": 1}', "refuses"),
        ("gym/basic_arithmetic,terms=3", "are no JSON"),
        ("gym/basic_arithmetic,[3]", "must be a JSON object"),
        ("no_such_module:task", "No module named 'no_such_module'"),
        ("{user}:sum", "has no function 'sum'; it has"),
        ("{user}:nothing", "returned a int"),
    ],
)
def test_a_name_that_means_nothing_is_refused(
    model: LoadedModel, users_folder: str, name: str, what: str
):
    with pytest.raises(UsageError, match=what):
        task_named(name.replace("{user}", users_folder), model)
