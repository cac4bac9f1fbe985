# SPDX-License-Identifier: Apache-2.0
"""What is written after `--kv-tier`."""

from __future__ import annotations

import pytest

from radixkv.engine.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.tiers.open_tiers import check_tiers
from radixkv.tiers.spec import parse_tiers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("floppy:a", "'floppy' is no kind of tier; write host:SIZE"),
        ("host", "^--kv-tier host: it says nothing after host; write host:SIZE"),
        ("host:", "says nothing after host; write host:SIZE"),
        ("host:4GiB,max=3", "option 'max' is not known; it takes long"),
        ("host:1g,long=-1", "long must be an integer of at least 0, not '-1'"),
        ("host:lots", "'lots' is not a size"),
        ("host:0", "a size of 0 holds nothing"),
        ("host:1e999", "larger than any memory"),
        ("disk: ", "says nothing after disk"),
        ("disk:/cache,Max=1GiB", "what follows the last comma .* is no option; write disk:PATH"),
        ("disk:/cache,max", "what follows the last comma"),
        ("disk:/cache,max=1GiB,", "what follows the last comma"),
        ("disk:/cache, max =1GiB", "what follows the last comma"),
        ("disk:~nobody-has-this-name/cache", "no such user"),
        ("disk:/a\0b", "null byte"),
        ("redis://host/0,ttl=0", "ttl must be 1 to"),
        ("redis://host/0,ttl=9999999999", "ttl must be 1 to 2147483647 seconds, not 9999999999"),
        ("redis://host/0,encrypt=on", "needs a secret"),
        ("redis://host/0?colour=red", "colour.*write redis://HOST"),
        ("rediss://host/0?ssl_cert_reqs=maybe", "write redis://HOST"),
    ],
)
def test_what_is_wrong_is_said(text, says):
    with pytest.raises(ConfigError, match=says):
        check_tiers(parse_tiers([text]))


def test_a_folder_is_given_once(tmp_path):
    with pytest.raises(ConfigError, match="the folder is given twice"):
        check_tiers(parse_tiers([f"disk:{tmp_path}", f"disk:{tmp_path}/../{tmp_path.name},max=1GiB"]))


def test_a_path_may_have_commas(tmp_path):
    (spec,) = parse_tiers([f"disk:{tmp_path}/a,b/c,d,max=1GiB"])
    assert (spec.where, spec.options) == (f"{tmp_path}/a,b/c,d", {"max": "1GiB"})


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
