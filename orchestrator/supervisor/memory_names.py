"""What the blocks of torch's CUDA allocator are: category, owner, tensor, and the line of their birth (pure).

What is known of a process besides its allocator's history (whose storage lies where) comes as `Known`;
without any, as on a controller, blocks are told apart by where they were born. Sizes are in bytes.
"""

import re
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from .memory_blocks import Block
from .memory_stacks import BACKWARD, OPTIMIZER, Sites, Stack

MOST_MODULES = 20
LEAST_VOCABULARY = 30_000
CUBLAS_WORKSPACES = frozenset((8_519_680, 33_554_432))
"""What torch gives cuBLAS before Hopper and since (CUDABlasHandlePool.cpp)."""

_MOST_CUBLAS_WORKSPACES = 2  # one for the main thread and one for autograd's
_ROUNDED_BY_BYTES = 512  # a storage is at most so much smaller than what was asked for
_LARGE_BYTES = 2**30  # what is told by names alone has at least so much
_TIMES_OF_OTHERS = 2  # an output in float32 among others in bfloat16 is no scores yet
_LEAST_ODD = 97  # a size is a multiple of such a number by chance in one case of a hundred
_MOST_HEAD_DIM = 512
_NOTHING: Mapping[Any, Any] = {}
_SCORES = re.compile("repeat_kv|expand_kv|math_attention|sdpa_dense|sdpa_math", re.IGNORECASE)
_SCORES_OF_ATTENTION = re.compile("score|softmax|weights|probs", re.IGNORECASE)
_ATTENTION = re.compile("atten[dt]|sdpa|flex", re.IGNORECASE)
_LOGITS = re.compile("logit|lm_head|cross_entropy|log_softmax|kl_div|loss", re.IGNORECASE)
_WORKSPACE = re.compile("workspace|benchmark|autotune", re.IGNORECASE)
_INPUT = re.compile("row|batch|input|data|collate|sample|token|states|feature", re.IGNORECASE)


class Owner(NamedTuple):
    """A storage that is a module's, its gradient, or an optimizer's state."""

    size: int
    category: str
    name: str
    module: Optional[str]
    shape: Tuple[int, ...]
    dtype: str


class Alive(NamedTuple):
    """A tensor that Python holds; the largest where several share a storage."""

    shape: Tuple[int, ...]
    dtype: str
    requires_grad: bool


class Known(NamedTuple):
    """What is known of a process besides its allocator's history.

    ``owners`` and ``alive`` go by the storage's address; ``vocabularies`` maps dimensions of at least 30,000
    to the other dimensions of their parameters; ``gradient_sizes`` counts the parameters whose gradients have
    a size; ``workspaces`` are the sizes of what cuBLAS gets.
    """

    owners: Mapping[int, Owner] = _NOTHING
    alive: Mapping[int, Alive] = _NOTHING
    sites: Sites = _NOTHING
    vocabularies: Mapping[int, FrozenSet[int]] = _NOTHING
    gradient_sizes: Mapping[int, int] = _NOTHING
    workspaces: FrozenSet[int] = CUBLAS_WORKSPACES
    torch_folder: Optional[str] = None


class Described(NamedTuple):
    """What a block is, as far as that can be told; the category is one of docs/architecture.md's."""

    bytes: int
    requested_bytes: int
    category: str
    name: Optional[str]
    shape: Optional[Tuple[int, ...]]
    dtype: Optional[str]
    module: Optional[str]
    where: Optional[str]
    phase: Optional[str]

    def as_json(self) -> Dict[str, Any]:
        """Returns it with plain values."""
        return dict(self._asdict(), shape=None if self.shape is None else list(self.shape))


def describe(blocks: Iterable[Block], known: Known) -> List[Described]:
    """Returns what the blocks are, the largest first."""
    ordered = sorted(blocks, key=lambda block: -block.size)
    owners = _owners_of(ordered, known)
    describer = _Describer(known, owners, _cublas_workspaces(ordered, owners, known.workspaces))
    describer.compare(ordered)
    return [describer.describe(block) for block in ordered]


def sums_by_category(described: Iterable[Described]) -> List[Dict[str, Any]]:
    """Returns bytes and blocks of each category, the largest first."""
    sums: Dict[str, List[int]] = {}
    for block in described:
        total = sums.setdefault(block.category, [0, 0])
        total[0] += block.bytes
        total[1] += 1
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    return [{"category": name, "bytes": size, "blocks": count} for name, (size, count) in ordered]


def sums_by_module(described: Iterable[Described]) -> List[Dict[str, Any]]:
    """Returns bytes of each module, down to the second part of its name, the largest first."""
    sums: Dict[str, int] = {}
    for block in described:
        if block.module:
            name = ".".join(block.module.split(".")[:2])
            sums[name] = sums.get(name, 0) + block.bytes
    ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return [{"module": name, "bytes": size} for name, size in ordered[:MOST_MODULES]]


class _Describer:
    """Describes blocks, each stack of frames once, and counts the gradients that have no owner."""

    def __init__(self, known: Known, owners: Mapping[int, Owner], workspaces: FrozenSet[int]) -> None:
        self._known = known
        self._owners = owners
        self._workspaces = workspaces
        self._stacks: Dict[Tuple[int, ...], Stack] = {}
        self._others: Dict[Optional[str], int] = {}
        self._gradients = dict(known.gradient_sizes)
        for owner in owners.values():
            if owner.category == "gradient" and owner.size in self._gradients:
                self._gradients[owner.size] -= 1

    def compare(self, blocks: Iterable[Block]) -> None:
        """Notes the largest block of each module besides those of its attention and over the vocabulary."""
        for block in blocks:
            stack = self._stack(block)
            if not (block.address in self._owners or stack.says(_ATTENTION) or self._is_logits(block, stack)):
                self._others[stack.module] = max(block.size, self._others.get(stack.module, 0))

    def describe(self, block: Block) -> Described:
        """Returns what the block is."""
        owner = self._owners.get(block.address)
        alive = self._known.alive.get(block.address)
        stack = self._stack(block)
        held = owner or alive
        return Described(
            bytes=block.size,
            requested_bytes=block.requested,
            category=self._category(block, alive, stack) if owner is None else owner.category,
            name=None if owner is None else owner.name,
            shape=None if held is None else held.shape,
            dtype=None if held is None else held.dtype,
            module=stack.module if owner is None else owner.module,
            where=stack.where,
            phase=None if block.frames is None else stack.phase,
        )

    def _stack(self, block: Block) -> Stack:
        """Returns a block's stack; equal ones share their frames in a snapshot of torch's."""
        key = tuple(map(id, block.frames or ()))
        if key not in self._stacks:
            self._stacks[key] = Stack(block.frames or (), self._known.sites, self._known.torch_folder)
        return self._stacks[key]

    def _category(self, block: Block, alive: Optional[Alive], stack: Stack) -> str:
        """Returns what a block is that nobody owns: the first that fits."""
        is_seen = block.frames is not None
        is_backward, is_optimizer = stack.phase == BACKWARD, stack.phase == OPTIMIZER
        candidates: Tuple[Tuple[str, Callable[[], bool]], ...] = (
            ("cublas", lambda: block.address in self._workspaces),
            ("logits", lambda: alive is not None and self._has_vocabulary(alive.shape, stack)),
            ("unnamed", lambda: not is_seen),
            ("optimizer_state", lambda: stack.is_making_state),
            ("temporary", lambda: is_optimizer),
            ("parameter", lambda: stack.is_making_module),
            ("gradient", lambda: is_backward and self._takes_gradient(block.requested)),
            ("logits", lambda: alive is None and self._is_logits(block, stack)),
            ("scores", lambda: self._is_scores(block, alive, stack)),
            ("workspace", lambda: stack.calls(_WORKSPACE)),
            ("temporary", lambda: is_backward),
            ("input", lambda: not stack.is_in_module and _is_input(alive, stack)),
        )
        return next((category for category, fits in candidates if fits()), "activation")

    def _is_scores(self, block: Block, alive: Optional[Alive], stack: Stack) -> bool:
        """Tells whether a block holds scores or expanded keys or values, by its shape where that is known.

        Else by the names of functions, or because attention made it far larger than all else of its module.
        """
        is_attention = stack.says(_ATTENTION)
        if stack.says(_SCORES) or (is_attention and stack.is_called(_SCORES_OF_ATTENTION)):
            return alive is None or len(alive.shape) > 2
        if not is_attention:
            return False
        if alive is None:
            others = self._others.get(stack.module, 0)
            return block.size > (_TIMES_OF_OTHERS * others or _LARGE_BYTES)
        return len(alive.shape) > 2 and alive.shape[-1] > _MOST_HEAD_DIM

    def _takes_gradient(self, size: int) -> bool:
        left = self._gradients.get(size, 0)
        if left > 0:
            self._gradients[size] = left - 1
        return left > 0

    def _is_logits(self, block: Block, stack: Stack) -> bool:
        """Tells whether a size is that of rows over a vocabulary, in two or four bytes each.

        A copy of the embedding or the head may have it too: then the names of functions decide.
        """
        is_said = stack.says(_LOGITS)
        for size, others in self._known.vocabularies.items():
            is_telling = size // (size & -size) >= _LEAST_ODD
            is_copy = block.requested in {size * other * item for other in others for item in (2, 4)}
            if block.requested % (2 * size) == 0 and (is_said or (is_telling and not is_copy)):
                return True
        return not self._known.vocabularies and stack.is_called(_LOGITS) and block.size >= _LARGE_BYTES

    def _has_vocabulary(self, shape: Tuple[int, ...], stack: Stack) -> bool:
        """Tells whether a tensor is rows over a vocabulary, as `_is_logits` does of a size."""
        found = [size for size in shape if size in self._known.vocabularies] if len(shape) > 1 else []
        is_said = stack.says(_LOGITS)
        return any(is_said or not self._known.vocabularies[size].intersection(shape) for size in found)


def _owners_of(blocks: Sequence[Block], known: Known) -> Dict[int, Owner]:
    """Returns the owners by the blocks' addresses, without storages whose place somebody else has now."""
    found = {}
    for block in blocks:
        owner = known.owners.get(block.address)
        if owner is not None and 0 <= block.requested - owner.size < _ROUNDED_BY_BYTES:
            found[block.address] = owner
    return found


def _cublas_workspaces(
    blocks: Sequence[Block], owners: Mapping[int, Owner], sizes: FrozenSet[int]
) -> FrozenSet[int]:
    """Returns the addresses of cuBLAS's workspaces: of blocks of such a size those that were born first."""
    found: List[int] = []
    for size in sizes:
        alike = [block for block in blocks if block.requested == size and block.address not in owners]
        alike.sort(key=lambda block: -1 if block.born is None else block.born)
        found += [block.address for block in alike[:_MOST_CUBLAS_WORKSPACES]]
    return frozenset(found)


def _is_input(alive: Optional[Alive], stack: Stack) -> bool:
    return stack.is_called(_INPUT) if alive is None else not alive.requires_grad
