"""What is written after `--kv-tier`."""

from __future__ import annotations

import pytest

from radixkv.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.tiers.open_tiers import check_tiers
from radixkv.tiers.spec import parse_tiers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("floppy:a", "'floppy' is no kind of tier; write host:SIZE"),
        ("host", "is no kind of tier|says nothing"),
        ("host:", "says nothing after host; write host:SIZE"),
        ("host:4GiB,max=3", "option 'max' is not known; it takes long"),
        ("host:1g,long=-1", "long must be an integer of at least 0, not '-1'"),
        ("host:lots", "'lots' is not a size"),
        ("host:0", "a size of 0 holds nothing"),
    ],
)
def test_what_is_wrong_is_said(text, says):
    with pytest.raises(ConfigError, match=says):
        check_tiers(parse_tiers([text]))


def test_several_are_given_in_order():
    specs = parse_tiers(["host:4GiB", "host:1.5g"])
    assert [(spec.kind, spec.size(spec.where)) for spec in specs] == [("host", 4 << 30), ("host", 3 << 29)]


def test_the_setting_takes_one_or_several():
    assert EngineConfig(kv_tier="host:1g").kv_tier == ("host:1g",)
    assert EngineConfig(kv_tier=["host:1g", "host:2g"]).kv_tier == ("host:1g", "host:2g")
    assert EngineConfig().kv_tier == ()
    with pytest.raises(ConfigError, match="kv_tier must be one text for each tier"):
        EngineConfig(kv_tier=(3,))
    with pytest.raises(ConfigError, match="kv_tier must be empty without prefix caching"):
        EngineConfig(kv_tier="host:1g", enable_prefix_caching=False)
