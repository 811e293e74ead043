"""Every number of a training, as frozen values: what each means, what it may be, and which fit together.

Files, presets and command lines are `dflash.training.config_file`'s business. Loads without torch, so that a
mistyped name is refused at once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dflash.config import ATTENTION_BACKENDS, DTYPES, LOSS_WEIGHTS, RECOMPUTE_POLICIES
from dflash.training.settings import Section, setting

LONG_DOCUMENTS = ("truncate", "drop")
DEVICE_SEPARATOR = "+"


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSettings(Section):
    """The frozen model that the drafter drafts for."""

    section: ClassVar[str] = "target"

    path: str = setting(
        "A folder with a Hugging Face causal LM, or a GGUF file; a config.json suffices for random weights.",
        is_filled=True,
    )
    dtype: str = setting("Type in which the target computes.", "bfloat16", choices=DTYPES)
    random_seed: int | None = setting(
        "Draw the weights with this seed instead of reading them, for tests of load and speed.",
        None,
        least=0,
        most=2**63 - 1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings(Section):
    """The documents, and how they become rows."""

    section: ClassVar[str] = "data"

    files: tuple[str, ...] = setting(
        "Files or folders with documents: conversations (messages or ShareGPT) or text as JSON lines, text "
        "files, Arrow or parquet with input_ids and loss_mask. A conversation's answers carry the loss.",
        is_filled=True,
    )
    token_budget: int = setting("Tokens of a row, padding included; one row is a micro-batch.", 8192, least=2)
    max_documents: int = setting("Documents that a row holds at most.", 32, least=1)
    max_document_tokens: int | None = setting(
        "Tokens after which a document is too long; null: the token budget.", None, least=2
    )
    long_documents: str = setting("What becomes of a longer document.", "truncate", choices=LONG_DOCUMENTS)
    held_out_share: float = setting(
        "Share of the documents, chosen by their hash, that validate and never train.",
        0.02,
        least=0.0,
        below=1.0,
    )
    thinking: bool | None = setting(
        "Thinking mode, as the chat template's enable_thinking; null leaves it to the template.", None
    )
    last_turn_only: bool = setting("Only a conversation's last answer carries the loss.", False)
    strict: bool = setting("A bad line ends the training; otherwise it is counted and told.", False)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSettings(Section):
    """The drafter's own numbers; all others of its architecture are the target's."""

    section: ClassVar[str] = "drafter"

    layers: int = setting("Transformer layers.", 5, least=1)
    block_size: int = setting("Slots of a block, the given token included.", 16, least=2)
    max_anchors: int = setting("Blocks that a row holds at most.", 512, least=1)
    target_layer_ids: tuple[int, ...] | None = setting(
        "Target layers whose states condition the drafter; null: spread evenly over the target.",
        None,
        least=0,
    )
    mask_token_id: int | None = setting(
        "Token that stands for what is not drafted yet; null: the target's mask or an unused token.",
        None,
        least=0,
    )
    sliding_window: int = setting("Tokens that all layers but the last one see.", 2048, least=2)
    attention_heads: int | None = setting("Query heads; null: the target's.", None, least=1)
    key_value_heads: int | None = setting("Key and value heads; null: the target's.", None, least=1)
    head_dim: int | None = setting("Width of a head; null: the target's.", None, least=2)
    dtype: str = setting(
        "Type of the weights; float32 masters are kept of a narrow one.", "bfloat16", choices=DTYPES
    )
    attention: str = setting(
        "How attention is computed; auto: flex on a GPU, sdpa_chunked elsewhere.",
        "auto",
        choices=ATTENTION_BACKENDS,
        may_change=True,
    )
    recompute: str = setting(
        "What backward computes again instead of keeping it.",
        "none",
        choices=RECOMPUTE_POLICIES,
        may_change=True,
    )
    compile: bool = setting("Compile what is between the matrix products.", True, may_change=True)
    loss_chunk_rows: int = setting(
        "Slots that meet the vocabulary at a time.", 2048, least=1, may_change=True
    )
    warm_start: str | None = setting(
        "A folder with a served drafter whose weights the first step starts from.", None
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings(Section):
    """What is minimised."""

    section: ClassVar[str] = "loss"

    kl_weight: float = setting(
        "The teacher's share of the loss; 0 leaves the teacher out, as d-pace needs it.",
        0.15,
        least=0.0,
        most=1.0,
    )
    weights: str = setting(
        "How slot k counts: decay, exp(-(k - 1)/gamma), or d-pace, by what the drafter is sure of.",
        "decay",
        choices=LOSS_WEIGHTS,
    )
    gamma: float = setting("Slots over which decay falls by a factor of e.", 7.0, least=1e-6)
    alpha: float = setting("What d-pace takes for granted of a confidence.", 0.5, above=0.0, most=1.0)
    noise: float = setting(
        "Uniform noise of ± this on the captured states, in training only.", 0.05, least=0.0
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)  # super() does not find its class where there are slots
        if self.weights == "d-pace" and self.kl_weight > 0:
            raise ValueError(
                f"loss.weights is d-pace, which weighs the cross-entropy alone, and loss.kl_weight is "
                f"{self.kl_weight}; set it to 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings(Section):
    """AdamW on float32 weights, with gradients clipped by their global norm."""

    section: ClassVar[str] = "optimizer"

    lr: float = setting("Learning rate at its peak.", 6e-4, above=0.0)
    betas: tuple[float, ...] = setting("Decay of AdamW's two moments.", (0.9, 0.95), least=0.0, below=1.0)
    eps: float = setting("AdamW's epsilon.", 1e-8, above=0.0)
    weight_decay: float = setting("Decay of matrices; norms do not decay.", 0.0, least=0.0)
    clip: float = setting("Largest norm of all gradients together.", 1.0, above=0.0)
    micro_batches: int = setting(
        "Rows of a step, over all drafters together; the number of drafters divides it.", 1, least=1
    )

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if len(self.betas) != 2:
            raise ValueError(f"optimizer.betas are {list(self.betas)}; they must be two")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSettings(Section):
    """How long, and how the learning rate goes: linear warm-up, then a cosine down to a floor."""

    section: ClassVar[str] = "schedule"

    steps: int | None = setting(
        "Optimizer steps of the whole training; null: by schedule.epochs.", None, least=1
    )
    epochs: int | None = setting("Passes over the data; null: by schedule.steps.", None, least=1)
    warmup_share: float = setting("Share of the steps that warm up.", 0.04, least=0.0, most=1.0)
    min_lr_share: float = setting("The floor, as a share of the peak.", 0.0, least=0.0, most=1.0)

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"schedule.steps is {self.steps} and schedule.epochs is {self.epochs}; "
                "give one of the two, null for the other"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings(Section):
    """Who computes where, and the queue between them."""

    section: ClassVar[str] = "workers"

    targets: tuple[str, ...] = setting(
        "One target worker for each entry; an entry is a device, or several joined by + over which one "
        "target is spread.",
        ("cuda:0",),
        is_filled=True,
        may_change=True,
    )
    drafters: tuple[str, ...] = setting(
        "One drafter for each device; all hold the same weights.",
        ("cuda:0",),
        is_filled=True,
        may_change=True,
    )
    queue_size: int = setting("Captured rows that wait at most.", 4, least=1, may_change=True)
    timeout_s: float = setting(
        "Seconds that a drafter waits for a row before the training ends with an error.",
        600.0,
        above=0.0,
        may_change=True,
    )

    @property
    def target_devices(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each target worker."""
        return tuple(tuple(entry.split(DEVICE_SEPARATOR)) for entry in self.targets)

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        _check_devices("workers.targets", [device for devices in self.target_devices for device in devices])
        _check_devices("workers.drafters", self.drafters)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings(Section):
    """What is kept and told while it trains."""

    section: ClassVar[str] = "run"

    folder: str = setting(
        "Where checkpoints, the config and TensorBoard's files go.",
        "training",
        is_filled=True,
        may_change=True,
    )
    seed: int = setting(
        "Decides order, anchors, noise and the drafter's first weights.", 0, least=0, most=2**63 - 1
    )
    resume: bool = setting(
        "Continue from the newest checkpoint in the folder, if any.", True, may_change=True
    )
    checkpoint_every: int = setting("Steps between checkpoints.", 500, least=1, may_change=True)
    checkpoint_keep: int = setting("Checkpoints that are kept.", 2, least=1, may_change=True)
    validate_every: int = setting("Steps between validations; 0: none.", 500, least=0, may_change=True)
    validate_rows: int = setting(
        "Held-out rows that a validation takes at most.", 64, least=1, may_change=True
    )
    log_every: int = setting("Steps between metric records.", 10, least=1, may_change=True)
    tensorboard: bool = setting("Write TensorBoard's files as well.", True, may_change=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything that a training is told.

    Raises:
        ValueError: two settings do not fit; the message names both by their paths.
    """

    target: TargetSettings
    data: DataSettings
    drafter: DrafterSettings
    loss: LossSettings
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    workers: WorkerSettings
    run: RunSettings

    @property
    def accumulation(self) -> int:
        """Micro-batches that each drafter contributes to a step."""
        return self.optimizer.micro_batches // len(self.workers.drafters)

    def __post_init__(self) -> None:
        drafters, rows = len(self.workers.drafters), self.optimizer.micro_batches
        if rows % drafters:
            raise ValueError(
                f"optimizer.micro_batches is {rows}, but workers.drafters names {drafters}; "
                "each must contribute as many to a step"
            )
        budget, longest = self.data.token_budget, self.data.max_document_tokens
        if longest is not None and longest > budget:
            raise ValueError(
                f"data.max_document_tokens is {longest}, but data.token_budget is {budget}; "
                "a document stands in one row"
            )
        block, window = self.drafter.block_size, self.drafter.sliding_window
        if window < block:
            raise ValueError(
                f"drafter.sliding_window is {window}, but drafter.block_size is {block}; "
                "the window must reach over a block"
            )


def _check_devices(name: str, devices: Sequence[str]) -> None:
    for device in devices:
        if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", device):
            raise ValueError(f"{name} holds {device!r}; a device is cpu, cuda or cuda:N")
