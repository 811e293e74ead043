"""Where a setting's path leads: beside the program, or into the samples that come with it.

    dflash:target         the sample target: a configuration and a tokenizer, without weights
    dflash:chats.jsonl    sample conversations

Loads without torch.
"""

from pathlib import Path

SAMPLES = Path(__file__).parents[1] / "samples"
PREFIX = "dflash:"


def place_of(path: str) -> Path:
    """Return the place that a setting names.

    Raises:
        ValueError: there is no such sample.
    """
    if not path.startswith(PREFIX):
        return Path(path)
    name = path.removeprefix(PREFIX)
    known = sorted(sample.name for sample in SAMPLES.iterdir())
    if name not in known:
        raise ValueError(f"{path} is no sample; there are {', '.join(PREFIX + each for each in known)}")
    return SAMPLES / name
