"""Settings of torch's allocator: what is accepted, in which spelling, and that torch takes it."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import allocator
from orchestrator.allocator import parse_alloc_conf, parse_setting, render_alloc_conf
from orchestrator.errors import UsageError

SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "backend": st.just("native"),
    "max_split_size_mb": st.integers(20, 100_000),
    "max_non_split_rounding_mb": st.integers(20, 100_000),
    "roundup_power2_divisions": st.one_of(
        st.sampled_from([1, 2, 4, 64]),
        st.dictionaries(st.sampled_from([1, 256, 512, 32768]), st.sampled_from([0, 1, 8]), min_size=1).map(
            lambda pairs: {str(key): pairs[key] for key in sorted(pairs)} | {">": 4}
        ),
    ),
    "garbage_collection_threshold": st.floats(0.001, 0.999),
    "expandable_segments": st.just(False),
    "release_lock_on_cudamalloc": st.booleans(),
    "pinned_use_cuda_host_register": st.booleans(),
    "pinned_num_register_threads": st.sampled_from([1, 2, 128]),
    "pinned_use_background_threads": st.booleans(),
    "graph_capture_record_stream_reuse": st.booleans(),
    "per_process_memory_fraction": st.floats(0.001, 1.0),
    "pinned_reserve_segment_size_mb": st.integers(1, 1000),
    "large_segment_size_mb": st.integers(11, 20),
    "throw_on_cudamalloc_oom": st.booleans(),
    "pinned_free_catch_all": st.booleans(),
    "pinned_max_round_threshold_mb": st.integers(0, 1000),
    "pinned_max_cached_size_mb": st.integers(0, 1000),
}
SAFE_SETTINGS = st.fixed_dictionaries({}, optional=SETTINGS)


def test_the_generated_settings_cover_every_known_key() -> None:
    assert set(SETTINGS) == set(allocator._PARSERS)


@given(SAFE_SETTINGS)
def test_rendered_settings_parse_back_to_themselves(settings: dict[str, Any]) -> None:
    parsed = parse_alloc_conf(settings)
    assert parsed == settings
    text = render_alloc_conf(parsed)
    assert parse_alloc_conf(text) == parsed
    assert render_alloc_conf(parse_alloc_conf(text)) == text


@given(SAFE_SETTINGS, st.randoms())
def test_the_rendered_text_does_not_depend_on_order_or_spaces(settings: dict[str, Any], random: Any) -> None:
    text = render_alloc_conf(parse_alloc_conf(settings))
    items = list(settings.items())
    random.shuffle(items)
    assert render_alloc_conf(parse_alloc_conf(dict(items))) == text
    assert render_alloc_conf(parse_alloc_conf(text.replace(":", " : ").replace(",", " , "))) == text


def test_a_yaml_mapping_and_torch_text_mean_the_same() -> None:
    assert render_alloc_conf(parse_alloc_conf({"expandable_segments": True})) == "expandable_segments:True"
    text = "roundup_power2_divisions:[256:1,512:2,>:8], max_split_size_mb:128"
    rendered = "max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:8]"
    assert render_alloc_conf(parse_alloc_conf(text)) == rendered
    assert parse_alloc_conf("") == parse_alloc_conf({}) == {}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expandable_segment", True, "is no allocator setting; did you mean 'expandable_segments'?"),
        ("max_split_size_mb", 3, "must be a whole number of at least 20, not 3"),
        ("backend", "cuda", "must be native or cudaMallocAsync, not 'cuda'"),
    ],
)
def test_a_message_about_one_setting_leaves_its_key_to_the_caller(
    key: str, value: object, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse_setting(key, value)
    assert str(caught.value) == message
    with pytest.raises(UsageError) as caught:
        parse_alloc_conf(f"{key}:{value}" if isinstance(value, str) else {key: value})
    assert str(caught.value) == f"{key!r} {message}"


@pytest.mark.parametrize(
    ("conf", "reason"),
    [
        ("expandable_segments", "kills"),
        ("expandable_segments:", "kills"),
        ("expandable_segments:True,", "kills"),
        (":True", "'' is no allocator setting"),
        ("expandable_segment:True", "did you mean 'expandable_segments'"),
        ("expandable_segments:True,expandable_segments:True", "twice"),
        ("expandable_segments:true", "spelled so"),
        ({"expandable_segments": "true"}, "spelled so"),
        ({"expandable_segments": 1}, "spelled so"),
        ({"max_split_size_mb": True}, "whole number"),
        ("max_split_size_mb:19", "at least 20"),
        ("max_split_size_mb:128.5", "whole number"),
        ("max_split_size_mb:-20", "whole number"),
        ("max_split_size_mb:99999999999", "whole number"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:0", "between 0 and 1"),
        ("garbage_collection_threshold:nan", "between 0 and 1"),
        ({"garbage_collection_threshold": float("nan")}, "between 0 and 1"),
        ("per_process_memory_fraction:1.01", "at most 1"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:0", "at least 1"),
        ("roundup_power2_divisions:[256:3]", "power of two"),
        ("roundup_power2_divisions:[100:2]", "power of two"),
        ("roundup_power2_divisions:[512:1,256:2]", "ascending"),
        ("roundup_power2_divisions:[>:1,256:2]", "ascending"),
        ("roundup_power2_divisions:[256:1,256:2]", "once"),
        ("roundup_power2_divisions:[256:1", "number or a list"),
        ("roundup_power2_divisions:[]", "number or a list"),
        ({"roundup_power2_divisions": {}}, "ascending"),
        ("pinned_num_register_threads:3", "power of two"),
        ("pinned_num_register_threads:256", "to 128"),
        ("backend:cuda", "native or cudaMallocAsync"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "below large_segment_size_mb"),
        ("large_segment_size_mb:10", "at least 11"),
        ("expandable_segments:True,max_split_size_mb:128", "keep one"),
        ("expandable_segments:True,garbage_collection_threshold:0.8", "keep one"),
        ("backend:cudaMallocAsync,expandable_segments:True", "ignores expandable_segments"),
    ],
)
def test_settings_that_torch_would_choke_on_or_ignore_are_refused(conf: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_alloc_conf(conf)


def test_torch_itself_takes_what_is_accepted_here() -> None:
    accepted = [
        "expandable_segments:True",
        "max_split_size_mb:20,garbage_collection_threshold:1e-05",
        "max_non_split_rounding_mb:20,max_split_size_mb:2147483647",
        "roundup_power2_divisions:[1:0,256:1,32768:2,>:8]",
        "roundup_power2_divisions:[>:8]",
        "roundup_power2_divisions:64",
        "large_segment_size_mb:11,max_split_size_mb:20",
        "large_segment_size_mb:40,max_split_size_mb:40,max_non_split_rounding_mb:40",
        "per_process_memory_fraction:1.0,pinned_max_cached_size_mb:0,pinned_max_round_threshold_mb:0",
    ]
    rendered = [render_alloc_conf(parse_alloc_conf(conf)) for conf in accepted]
    code = "import sys, torch\nfor conf in sys.argv[1:]: torch._C._accelerator_setAllocatorSettings(conf)"
    subprocess.run([sys.executable, "-c", code, *rendered], check=True)
