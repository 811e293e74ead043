"""A target answers prompts: its own greedy words, kept as token ids, the same whatever came between."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.data import answering, generate
from dflash.data.loading import LoadOptions, load_documents
from dflash.data.options import parse_options
from dflash.target.loading import load_target
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.payload.chat_tokenizers import CHATML, THINKING, bytes_tokenizer, decoded
from tests.payload.test_events import Watcher

TOKENIZER = bytes_tokenizer(CHATML)
NEW = 8
QUESTIONS = [
    "what is it",
    "is it",
    "1 + 1",
    "read",
    "and the answer was",
    "think",
    "yes and yes and yes",
    "über",
]


def model(path: Path, template: str, **brought: Any) -> LlamaForCausalLM:
    """Save a small random target and return it; `brought` stands in its generation_config.json."""
    tokenizer = bytes_tokenizer(template)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        target = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=128,
                initializer_range=0.4,
            )
        )
    target.generation_config = GenerationConfig(**brought)  # type: ignore[no-untyped-call]
    target.save_pretrained(path)
    tokenizer.save_pretrained(path)
    target.train(mode=False)
    return target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose own settings would have it sample, repeat nothing and end with a word that it likes."""
    path = tmp_path_factory.mktemp("a target")
    brought = {"do_sample": True, "temperature": 5.0, "top_p": 0.5, "repetition_penalty": 3.0}
    plain = model(path, CHATML)
    answers = [greedy(plain, prompt_ids(question)) for question in QUESTIONS]
    liked = answers[0][4]
    assert any(liked not in answer for answer in answers)
    model(path, CHATML, eos_token_id=[liked, TOKENIZER.eos_token_id], **brought)
    return path


def prompt_ids(question: str) -> list[int]:
    text = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def greedy(plain: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    """Return the argmax, token by token, of one prompt alone, without a cache."""
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(plain(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def run(target: Path, prompts: Path, out: Path, *more: str) -> int:
    fixed = ["--device", "cpu", "--dtype", "float32", "--batch-size", "3", "--max-new-tokens", str(NEW)]
    named = ["--target", str(target), "--prompts", str(prompts), "--out", str(out)]
    return generate.main([*named, *fixed, "--max-prompt-tokens", "80", *more])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return written(tmp_path / "prompts.jsonl", [{"prompt": question} for question in QUESTIONS])


def written(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.jsonl"))}


def lines(out: Path) -> Iterator[dict[str, Any]]:
    for content in shards(out).values():
        for line in content.splitlines():
            yield json.loads(line)


def test_answers_are_the_targets_own_greedy_ones_to_their_end(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    assert run(target, prompts, tmp_path / "out") == 0
    plain = load_target(str(target), device="cpu", dtype="float32").model
    ends = json.loads((target / "generation_config.json").read_text())["eos_token_id"]
    expected = {}
    for question in QUESTIONS:
        prompt, answer = prompt_ids(question), greedy(plain, prompt_ids(question))
        ending = next((place + 1 for place, token in enumerate(answer) if token in ends), NEW)
        expected[question] = (prompt, answer[:ending], answer[ending - 1] in ends)
    found = list(lines(tmp_path / "out"))
    assert [line["input_ids"] for line in found] == [
        prompt + answer for prompt, answer, _ in expected.values()
    ]
    assert [line["loss_mask"] for line in found] == [
        [0] * len(prompt) + [1] * len(answer) for prompt, answer, _ in expected.values()
    ]
    finished = [line["is_finished"] for line in found]
    assert finished == [is_finished for _, _, is_finished in expected.values()]
    assert set(finished) == {True, False}


def test_answers_are_loaded_as_documents_with_their_prompts_keys(target: Path, tmp_path: Path) -> None:
    records = [{"prompt": question, "key": question[:1]} for question in QUESTIONS]
    run(target, written(tmp_path / "prompts.jsonl", records), tmp_path / "out")
    (tmp_path / "out" / ".answers-half.jsonl.unfinished").write_text('{"prompt')
    options = LoadOptions(max_document_tokens=128, held_out_share=0.4)
    loaded = load_documents([tmp_path / "out"], options=options, tokenizer=None, vocab_size=len(TOKENIZER))
    assert not loaded.report.dropped
    sides = [
        {decoded(TOKENIZER, document.tokens).split("user\n")[1][0] for document in side}
        for side in (loaded.train, loaded.held_out)
    ]
    assert sides[0] | sides[1] == {question[0] for question in QUESTIONS}
    assert sides[1]
    assert not sides[0] & sides[1]


class Interrupted(Exception):
    """Something ended the process."""


def test_interrupted_generation_goes_on_to_the_same_answers(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sampling = ("--temperature", "1.5", "--seed", "7")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(target, prompts, whole, *sampling)
    seeds: list[int] = []

    class Ended(answering.Answerer):
        def answer(self, *arguments: Any, **options: Any) -> list[list[int]]:
            seeds.append(options["seed"])
            if len(seeds) == 3:
                raise Interrupted
            return super().answer(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(answering, "Answerer", Ended)
        with pytest.raises(Interrupted):
            run(target, prompts, broken, *sampling)
    assert list(shards(broken)) == list(shards(whole))[:2]
    assert len(set(seeds)) == 3  # or all batches would draw alike
    # Copies of both ended early, in a line and between two, and a third was being written.
    first, second = (broken / name for name in shards(broken))
    first.write_bytes(first.read_bytes()[:-40])
    second.write_bytes(b"".join(second.read_bytes().splitlines(keepends=True)[:-1]))
    (broken / ".answers-000002-0.jsonl.unfinished").write_text('{"prompt')
    torch.rand(5)
    capsys.readouterr()
    assert run(target, prompts, broken, *sampling) == 0
    assert shards(broken) == shards(whole)
    told = capsys.readouterr().out
    assert all(f"{name} was not whole" in told for name in (first.name, second.name))
    assert not list(broken.glob("*.unfinished"))
    assert len(list(lines(broken))) == len(QUESTIONS)


def test_sampled_answers_depend_on_the_seed(target: Path, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": "what is it"}])
    for seed in ("1", "2"):
        run(target, prompts, tmp_path / seed, "--temperature", "2", "--seed", seed)
    one, other = ([line["input_ids"] for line in lines(tmp_path / seed)] for seed in ("1", "2"))
    assert one != other


def test_answered_prompts_are_skipped_wherever_they_stand_now(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(target, prompts, out)
    before = shards(out)
    more = [{"prompt": question} for question in ["new", *reversed(QUESTIONS), "newer", "new"]]
    capsys.readouterr()
    assert run(target, written(prompts, more), out) == 0
    assert capsys.readouterr().out.count("1 prompts, ") == 2
    after = shards(out)
    assert {name: after[name] for name in before} == before
    assert len(list(lines(out))) == len(QUESTIONS) + 2
    assert run(target, prompts, out) == 0
    assert shards(out) == after


def test_time_that_is_up_ends_between_batches(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = iter(range(0, 10_000, 10))  # ten seconds from each look at it to the next
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    assert run(target, prompts, tmp_path / "out", "--max-seconds", "45") == 0
    # Batch 0 is begun at 10 and takes 10; at 40 another one would end at 50.
    assert list(shards(tmp_path / "out")) == [name for name in shards(tmp_path / "out") if "000000" in name]
    assert "the time is up after 3 prompts; the same command goes on" in capsys.readouterr().out


def test_throughput_is_printed_and_emitted(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    watcher = Watcher()
    monkeypatch.setenv("ORCH_EVENTS_FD", watcher.address)
    run(target, prompts, tmp_path / "out")
    events = watcher.events()
    assert [event["name"] for event in events if event["kind"] == "phase"] == ["loading", "generating"]
    rates = [event for event in events if event["name"] == "generate.tokens_per_s"]
    assert [event["step"] for event in rates] == [0, 1, 2]
    assert all(event["value"] > 0 for event in rates)
    (last,) = [event for event in events if event["name"] == "generate.answer_tokens" and event["step"] == 2]
    tokens = sum(sum(line["loss_mask"]) for line in lines(tmp_path / "out"))
    assert last["value"] == tokens
    text = capsys.readouterr().out
    assert text.count("tokens/s") == 3
    assert "all 8 prompts have their answer" in text


def test_answers_by_other_settings_are_not_mixed(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(target, prompts, tmp_path / "out")
    capsys.readouterr()
    before = shards(tmp_path / "out")
    assert run(target, prompts, tmp_path / "out", "--temperature", "0.5") == 1
    assert (
        "temperature was 0.0 and is 0.5, seed was None and is 0; take another folder"
        in capsys.readouterr().err
    )
    other = tmp_path / "another target"
    model(other, THINKING)
    assert run(other, prompts, tmp_path / "out", "--thinking", "false") == 1
    told = capsys.readouterr().err
    assert "thinking left to it' and is 'template" in told
    assert "thinking off'" in told
    assert shards(tmp_path / "out") == before


def test_each_answer_of_a_conversation_is_made_anew(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [
        ("human", "what is it"),
        ("gpt", "the answer"),
        ("human", "is it"),
        ("gpt", "yes"),
        ("human", "and"),
    ]
    record = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    bad = [{"text": "no question"}, {"prompt": "yes " * 90}, {"prompt": 5}]
    run(
        target,
        written(tmp_path / "prompts.jsonl", [record, *bad]),
        tmp_path / "out",
        "--max-prompt-tokens",
        "100",
    )
    texts = [
        decoded(
            TOKENIZER,
            (token for token, on in zip(line["input_ids"], line["loss_mask"], strict=True) if not on),
        )
        for line in lines(tmp_path / "out")
    ]
    assert [text.count("<|im_start|>user") for text in texts] == [1, 2, 3]
    assert all(text.endswith("<|im_start|>assistant\n") for text in texts)
    assert "the answer<|im_end|>\n<|im_start|>user\nis it" in texts[1]
    assert len({line["key"] for line in lines(tmp_path / "out")}) == 1
    told = capsys.readouterr().out
    assert "dropped 2 prompts: bad line\n" in told
    assert "prompts.jsonl:2: holds no prompt and no conversation" in told
    assert "dropped 1 prompts: too long\n" in told


def test_bad_prompt_is_fatal_when_strict(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "prompts.jsonl", [{"prompt": "what"}, {"prompt": 5}])
    assert run(target, file, tmp_path / "out", "--strict", "true") == 1
    assert "prompts.jsonl:2: prompt is int, not a string; mend or remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--max-new-tokens", "60"], "sum to 140; the target has 128 positions"),
        (["--thinking", "true"], "no enable_thinking"),
        (["--target", "/nowhere"], "/nowhere is not there"),
        (["--prompts", "/nowhere.jsonl"], "no data at /nowhere.jsonl"),
    ],
)
def test_what_cannot_work_is_one_line_and_leaves_no_answers(
    more: list[str],
    words: str,
    target: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(target, prompts, tmp_path / "out", *more) == 1
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert not shards(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "x", "--out", "y"], "--prompts is missing: a file or folder of prompts"),
        (["--set", "batchsize=3"], "unknown parameter 'batchsize'; did you mean 'batch_size'?"),
        (["--batch-size", "0"], "batch_size is 0; it must be greater than 0"),
        (["--batch-size", "many"], "batch_size is 'many'; it must be an integer"),
        (["--dtype", "float8"], "unknown dtype 'float8'"),
        (["--temperature", "-1"], "temperature is -1.0; 0 is greedy"),
        (["--batchsize", "3"], "unrecognized arguments: --batchsize 3"),
    ],
)
def test_refused_options_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ["--target", "x", "--prompts", "y", "--out", "z"] if "--target" not in arguments else []
    with pytest.raises(SystemExit) as leaving:
        generate.main([*rest, *arguments])
    told = capsys.readouterr().err
    assert (leaving.value.code, told.count("\n")) == (2, 1)
    assert words in told


def test_options_come_from_a_file_of_parameters_too(tmp_path: Path) -> None:
    file = tmp_path / "params.json"
    file.write_text(
        json.dumps({"target": "t", "prompts": ["a", "b"], "out": "o", "batch_size": 4, "seed": 1})
    )
    params = parse_options(
        generate.GenerateParams,
        [
            "--params",
            str(file),
            "--set",
            "seed=2",
            "--batch-size",
            "5",
            "--out",
            "007",
            "--thinking",
            "false",
        ],
        program="p",
        description="d",
    )
    assert (params.prompts, params.batch_size, params.seed, params.out) == (("a", "b"), 5, 2, "007")
    assert params.thinking is False
