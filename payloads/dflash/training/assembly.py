"""What a training is made of, built from its settings: targets, documents, rows, drafters.

Knows the order in which one needs the other. Who computes when is `dflash.training.loop`'s business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash.data.loading import LoadedData, LoadOptions, load_documents
from dflash.data.row_source import RowSource
from dflash.drafter import DFlashDrafter
from dflash.optimizer import MasterAdamW
from dflash.serving import load_drafter, read_pairing
from dflash.target.capture import Target
from dflash.target.drafter_config import choose_mask_token, default_target_layer_ids, drafter_config_for
from dflash.target.loading import LoadedTarget, load_target
from dflash.training.config import TrainConfig
from dflash.training.feeding import Feeder
from dflash.training.places import place_of
from dflash.training.step import Objective

HELD_OUT_SEED = 0  # held-out rows are packed in one way, whatever the run's seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Rows to train on and rows held out; None where nothing was held out."""

    train: RowSource
    held_out: RowSource | None
    loaded: LoadedData


def build_feeders(
    config: TrainConfig, places: Sequence[tuple[str, ...]]
) -> tuple[LoadedTarget, list[Feeder]]:
    """Return the first target as it was loaded, and one for each place.

    Raises:
        ValueError: a target cannot be loaded, or its states cannot be captured.
    """
    loaded = [
        load_target(
            place_of(config.target.path),
            device=place,
            dtype=config.target.dtype,
            random_seed=config.target.random_seed,
        )
        for place in places
    ]
    layer_ids = target_layer_ids(config, loaded[0])
    return loaded[0], [Feeder(Target(each.model, layer_ids)) for each in loaded]


def target_layer_ids(config: TrainConfig, target: LoadedTarget) -> tuple[int, ...]:
    """Return the captured layers: the settings', else those of a warm start, else some spread evenly."""
    settings = config.drafter
    if settings.target_layer_ids is not None:
        return settings.target_layer_ids
    if settings.warm_start is not None:
        return read_pairing(place_of(settings.warm_start)).target_layer_ids
    return default_target_layer_ids(target.config.get_text_config().num_hidden_layers)


def build_data(config: TrainConfig, target: LoadedTarget) -> Data:
    """Return the documents' rows.

    Raises:
        ValueError: files are missing, or nothing is left to train on.
    """
    data, budget = config.data, config.data.token_budget
    loaded = load_documents(
        [place_of(file) for file in data.files],
        options=LoadOptions(
            max_document_tokens=data.max_document_tokens or budget,
            long_documents=data.long_documents,
            thinking=data.thinking,
            last_turn_only=data.last_turn_only,
            held_out_share=data.held_out_share,
            strict=data.strict,
        ),
        tokenizer=target.tokenizer,
        vocab_size=target.config.get_text_config().vocab_size,
    )
    rows = {"budget": budget, "max_documents": data.max_documents}
    held_out = RowSource(loaded.held_out, seed=HELD_OUT_SEED, **rows) if len(loaded.held_out) else None
    return Data(train=RowSource(loaded.train, seed=config.run.seed, **rows), held_out=held_out, loaded=loaded)


def build_drafter(
    config: TrainConfig, target: LoadedTarget, feeder: Feeder, device: torch.device
) -> DFlashDrafter:
    """Return a drafter on its device; the same settings give the same weights on devices of one kind.

    Raises:
        ValueError: the numbers do not fit, or a warm start is another target's.
    """
    drafter = (
        _started_warm(config, target, device) if config.drafter.warm_start else _drawn(config, target, device)
    )
    drafter.use_target_weights(
        embed_tokens_VH=feeder.target.embed_tokens_VH.to(device),
        lm_head_VH=feeder.target.lm_head_VH.to(device),
    )
    return drafter.to(device)


def build_optimizer(config: TrainConfig, drafter: DFlashDrafter) -> MasterAdamW:
    """Return the drafter's optimizer."""
    settings = config.optimizer
    first, second = settings.betas
    return MasterAdamW(
        drafter.parameters(),
        lr=settings.lr,
        betas=(first, second),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def build_objective(config: TrainConfig) -> Objective:
    """Return what a slot's loss is; a teacher without weight is not asked."""
    loss = config.loss
    return Objective(
        use_soft_labels=loss.kl_weight > 0,
        kl_weight=loss.kl_weight,
        gamma=loss.gamma,
        loss_weights=loss.weights,
        alpha=loss.alpha,
    )


def _drawn(config: TrainConfig, target: LoadedTarget, device: torch.device) -> DFlashDrafter:
    settings = config.drafter
    numbers = drafter_config_for(
        target.config,
        num_draft_layers=settings.layers,
        sliding_window=settings.sliding_window,
        dtype=settings.dtype,
        **_heads(config),
        **_computing(config),
    )
    cards = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cards), torch.device(device):
        torch.manual_seed(config.run.seed)
        return DFlashDrafter(
            config=numbers,
            target_layer_ids=target_layer_ids(config, target),
            block_size=settings.block_size,
            max_anchors=settings.max_anchors,
            mask_token_id=choose_mask_token(target.config, target.tokenizer, settings.mask_token_id),
        )


def _started_warm(config: TrainConfig, target: LoadedTarget, device: torch.device) -> DFlashDrafter:
    settings = config.drafter
    assert settings.warm_start is not None
    drafter = load_drafter(
        place_of(settings.warm_start),
        max_anchors=settings.max_anchors,
        device=str(device),
        block_size=settings.block_size,
        dtype=settings.dtype,
        **_computing(config),
    )
    wanted = target_layer_ids(config, target)
    if settings.target_layer_ids is not None and drafter.target_layer_ids != wanted:
        raise ValueError(
            f"drafter.warm_start was trained on the target's layers {list(drafter.target_layer_ids)}, but "
            f"drafter.target_layer_ids are {list(wanted)}; leave them out, or start from another drafter"
        )
    return drafter


def _heads(config: TrainConfig) -> dict[str, int]:
    """Return what of the drafter's attention is not the target's."""
    settings = config.drafter
    given = {
        "num_attention_heads": settings.attention_heads,
        "num_key_value_heads": settings.key_value_heads,
        "head_dim": settings.head_dim,
    }
    return {name: value for name, value in given.items() if value is not None}


def _computing(config: TrainConfig) -> dict[str, Any]:
    settings = config.drafter
    return {
        "attention": settings.attention,
        "recompute": settings.recompute,
        "compile": settings.compile,
        "loss_chunk_rows": settings.loss_chunk_rows,
    }
