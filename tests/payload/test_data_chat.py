"""Which tokens of a conversation are learnt: answers as the target would write them, to the end of turn."""

import itertools
from typing import Any

import pytest
from dflash.data.chat import Chat, Refused
from dflash.data.records import Conversation, parse_record
from dflash.data.rows import Document
from dflash.data.tokenising import Tokeniser, answer_mask
from transformers import PreTrainedTokenizerFast

from tests.payload import chat_tokenizers as templates
from tests.payload.chat_tokenizers import bytes_tokenizer, decoded, words_tokenizer

QUESTION, OTHER = {"role": "user", "content": "what is it"}, {"role": "user", "content": "and 1 + 1?"}


def answer(content: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


def conversation(*messages: dict[str, Any]) -> Conversation:
    record = parse_record({"messages": list(messages)})
    assert isinstance(record, Conversation)
    return record


def document(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, Any], **options: Any) -> Document:
    tokeniser = Tokeniser(tokenizer, vocab_size=len(tokenizer), **options)
    return tokeniser.document(conversation(*messages), "here:1")


def learnt(tokenizer: PreTrainedTokenizerFast, found: Document) -> list[str]:
    """Return the text of each run of learnt tokens."""
    runs = itertools.groupby(
        zip(found.tokens.tolist(), found.loss_mask.tolist(), strict=True), key=lambda pair: pair[1]
    )
    return [decoded(tokenizer, (token for token, _ in run)) for is_learnt, run in runs if is_learnt]


def learnt_of(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, Any], **options: Any) -> list[str]:
    return learnt(tokenizer, document(tokenizer, *messages, **options))


def test_every_answer_is_learnt_to_its_end_of_turn_and_nothing_else() -> None:
    tokenizer = bytes_tokenizer(templates.CHATML)
    found = document(tokenizer, QUESTION, answer("yes, it is"), OTHER, answer("2 🐍"))
    assert learnt(tokenizer, found) == ["yes, it is<|im_end|>", "2 🐍<|im_end|>"]
    assert decoded(tokenizer, found.tokens) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nwhat is it<|im_end|>\n<|im_start|>assistant\nyes, it is<|im_end|>\n"
        "<|im_start|>user\nand 1 + 1?<|im_end|>\n<|im_start|>assistant\n2 🐍<|im_end|>\n"
    )


def test_prompt_of_an_answer_ends_where_the_answer_begins() -> None:
    tokenizer = bytes_tokenizer(templates.CHATML)
    messages = (QUESTION, answer("yes"), OTHER, answer("2"))
    found = document(tokenizer, *messages)
    for turn in (1, 3):
        prompt = Chat(tokenizer).prompt(conversation(*messages), turn)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert found.tokens[: len(ids)].tolist() == ids
        assert not found.loss_mask[len(ids) - 1]
        assert found.loss_mask[len(ids)]


def test_last_turn_only_learns_the_last_answer() -> None:
    tokenizer = bytes_tokenizer()
    messages = (QUESTION, answer("yes"), OTHER, answer("2"), OTHER)
    assert learnt_of(tokenizer, *messages, last_turn_only=True) == ["2<|im_end|>"]


def test_answers_found_are_those_that_a_template_marks() -> None:
    tokenizer = bytes_tokenizer(templates.MARKED)
    messages = [QUESTION, answer("yes\n"), OTHER, answer(" the answer is 2")]
    marked: Any = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)
    found = document(tokenizer, *messages)
    assert found.tokens.tolist() == marked["input_ids"]
    assert found.loss_mask.astype(int).tolist() == marked["assistant_masks"]
    assert sum(marked["assistant_masks"]) > 4


THOUGHT = answer("<think>\nthe question\n</think>\n\nyes")


@pytest.mark.parametrize(
    ("template", "thinking", "last"),
    [
        ("THINKING", None, "<think>\nand\n</think>\n\n2<|im_end|>"),
        ("THINKING", True, "<think>\nand\n</think>\n\n2<|im_end|>"),
        ("OPENING", True, "and\n</think>\n\n2<|im_end|>"),
    ],
)
def test_thoughts_dropped_from_earlier_turns_leave_the_answers_right(
    template: str, thinking: bool | None, last: str
) -> None:
    tokenizer = bytes_tokenizer(getattr(templates, template))
    messages = (QUESTION, THOUGHT, OTHER, answer("<think>\nand\n</think>\n\n2"))
    assert learnt_of(tokenizer, *messages, thinking=thinking) == ["yes<|im_end|>", last]


def test_without_thinking_empty_thoughts_are_prompt_and_not_learnt() -> None:
    tokenizer = bytes_tokenizer(templates.THINKING)
    messages = (QUESTION, answer("yes"), OTHER, answer("2"))
    assert learnt_of(tokenizer, *messages, thinking=False) == ["yes<|im_end|>", "2<|im_end|>"]
    found = document(tokenizer, *messages, thinking=False)
    assert decoded(tokenizer, found.tokens).endswith("<think>\n\n</think>\n\n2<|im_end|>\n")


def test_earlier_answer_that_begins_like_the_prompts_thoughts_is_learnt_whole() -> None:
    tokenizer = bytes_tokenizer(templates.THINKING)
    messages = (QUESTION, answer("<html> is it"), OTHER, answer("<html>"))
    expected = ["<html> is it<|im_end|>", "<html><|im_end|>"]
    assert learnt_of(tokenizer, *messages, thinking=False) == expected


def test_answer_that_also_stands_behind_later_thoughts_ends_in_its_own_turn() -> None:
    tokenizer = bytes_tokenizer(templates.THINKING)
    messages = (QUESTION, answer("yes"), OTHER, answer("<think>\nwhat\n</think>\n\nyes"))
    assert learnt_of(tokenizer, *messages) == ["yes<|im_end|>", "<think>\nwhat\n</think>\n\nyes<|im_end|>"]


def test_call_of_a_tool_is_learnt_with_the_answer_after_the_result() -> None:
    tokenizer = bytes_tokenizer(templates.THINKING)
    call = answer("", tool_calls=[{"name": "read"}])
    messages = (QUESTION, call, {"role": "tool", "content": "2"}, answer("it is 2"))
    empty = "<think>\n\n</think>\n\n"
    assert learnt_of(tokenizer, *messages) == [
        f"{empty}<tool_call>read</tool_call><|im_end|>",
        f"{empty}it is 2<|im_end|>",
    ]


def test_word_with_its_space_and_the_end_of_text_are_learnt() -> None:
    tokenizer = words_tokenizer()
    found = document(tokenizer, QUESTION, answer("  yes and  "), OTHER, answer("2"))
    assert learnt(tokenizer, found) == ["yes and</s>", "2</s>"]
    assert found.tokens.tolist().count(tokenizer.bos_token_id) == 1


def test_end_of_text_behind_the_whole_conversation_is_not_learnt() -> None:
    tokenizer = bytes_tokenizer(templates.ENDING)
    tokenizer.eos_token = "<|endoftext|>"
    messages = (QUESTION, answer("yes"), OTHER, answer("2"))
    assert learnt_of(tokenizer, *messages) == ["yes<|im_end|>", "2<|im_end|>"]


def test_template_without_end_of_turn_learns_the_words_alone() -> None:
    tokenizer = bytes_tokenizer(templates.PLAIN)
    assert learnt_of(tokenizer, QUESTION, answer("yes"), OTHER, answer("2")) == [" yes", " 2"]


def test_answer_before_any_question_is_not_learnt() -> None:
    assert learnt_of(bytes_tokenizer(), answer("what"), QUESTION, answer("yes")) == ["yes<|im_end|>"]


def test_answer_that_says_what_ends_a_turn_is_not_cut_short() -> None:
    tokenizer = bytes_tokenizer()
    messages = (QUESTION, answer("im_end"), OTHER, answer("end|>"))
    assert learnt_of(tokenizer, *messages) == ["im_end<|im_end|>", "end|><|im_end|>"]


def changed(words: str, others: str) -> str:
    assert words in templates.CHATML
    return templates.CHATML.replace(words, others)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (changed("message.content +", "message.content | upper +"), "does not stand where"),
        (
            changed("{%- endfor %}", "{{ messages | length }}{% endfor %}"),
            "rewrites what stands before turn 2",
        ),
        (changed("{{ '<|im_start|>assistant", "{{ 'bot: <|im_start|>"), "otherwise than it prompts"),
        (templates.INSTRUCT.replace("'user'", "'system'"), "Only user and assistant roles"),
        ("{{ messages[5].content.strip() }}", "has no element 5"),
    ],
    ids=["other words", "rewritten", "another beginning", "refusing", "broken"],
)
def test_conversation_whose_answers_cannot_be_found_is_refused(template: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        document(bytes_tokenizer(template), QUESTION, answer("yes"), OTHER, answer("2"))


@pytest.mark.parametrize(
    ("has_special_tokens", "reason"), [(True, "does not stand where"), (False, "within the one after it")]
)
def test_answer_that_a_template_drops_is_not_found_in_a_later_turn(
    has_special_tokens: bool, reason: str
) -> None:
    kept = "loop.last or message.role == 'user'"
    rewriting = templates.THINKING.replace("{{- said }}", f"{{{{- said if {kept} else 'dropped' }}}}")
    if not has_special_tokens:
        rewriting = rewriting.replace("<|im_end|>", "").replace("<|im_start|>", "")
    messages = (QUESTION, answer("yes"), OTHER, answer("<think>\nwhat\n</think>\n\nyes"))
    with pytest.raises(Refused, match=reason):
        document(bytes_tokenizer(rewriting), *messages)


def test_token_across_an_edge_is_learnt_only_when_spaces_stand_before_the_answer() -> None:
    text, answers = "a: bc  de f", [(3, 5), (7, 9)]
    offsets = [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9), (9, 11)]
    # " b" begins with a space; "c " runs over the end; " d", "e" are the second answer.
    assert answer_mask(text, answers, offsets).tolist() == [False, True, False, True, True, False]
    assert answer_mask(text, [(1, 4)], [(0, 2), (2, 3), (3, 4)]).tolist() == [False, True, True]


@pytest.mark.parametrize(
    "calls", [7, [{"name": "\ud800"}], [{}, {}]], ids=["number", "half a character", "empty"]
)
def test_tool_calls_that_the_template_cannot_write_are_refused(calls: Any) -> None:
    template = templates.THINKING.replace("[0].name +", "[0].name.strip() +")
    with pytest.raises(Refused, match=r"the chat template says: [^\n]+$"):
        document(bytes_tokenizer(template), QUESTION, answer("", tool_calls=calls))


def test_template_and_thinking_mode_are_described() -> None:
    assert Chat(bytes_tokenizer(templates.THINKING), thinking=False).description.endswith("thinking off")
    left = [
        Chat(bytes_tokenizer(template)).description for template in (templates.THINKING, templates.CHATML)
    ]
    assert left[0] != left[1]
    assert all(text.endswith("thinking left to it") for text in left)


def test_missing_template_and_missing_thinking_mode_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="no chat template; give it one"):
        Chat(bytes_tokenizer(None))
    with pytest.raises(ValueError, match="no enable_thinking; leave it out"):
        Chat(bytes_tokenizer(templates.CHATML), thinking=True)
