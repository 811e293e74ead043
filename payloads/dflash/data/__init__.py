"""Documents from files become rows of a token budget, the same ones whenever they are asked for again.

    files.py        lines of JSONL, text files, Arrow and parquet rows, each with its place
    records.py      what a line may hold: a conversation, a text, token ids
    chat.py         the target's chat template, and which characters of it are answers
    tokenising.py   a record as token ids and a loss mask
    loading.py      all of it, with what was dropped and why (report.py), held-out ones apart (held_out.py)
    corpus.py       many documents in little memory
    epochs.py       which documents share a row; row_source.py: rows from any place in any epoch
    generate.py     the target answers prompts; prompts.py: prompts from docstrings of installed libraries

Nothing here knows the drafter, a target's hidden states or ranks.
"""
