"""The page as text.

Everything stands in it, nothing in it can leave it, and no token can end its script.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import re

import pytest

import pagedkv as pk
from pagedkv.lab.show import page, picture


def parts(document: str) -> tuple[str, str, str, str]:
    """Policy, style, data and script of a page."""
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', document)[1])
    style = re.search(r"<style>(.*?)</style>", document, re.DOTALL)[1]
    data = re.search(r'<script type="application/json" id="recording">(.*?)</script>', document, re.DOTALL)[1]
    script = re.search(r"<script>(.*?)</script>", document, re.DOTALL)[1]
    return policy, style, data, script


def test_the_recording_and_its_pictures_stand_in_the_page(demo):
    data = json.loads(parts(page(demo, step=3))[2])
    assert data["recording"] == json.loads(json.dumps(demo.to_dict()))
    assert data["pictures"] == [picture(demo, i + 1) for i in range(len(demo.frames))]
    assert data["start"] == 3


def test_the_policy_lets_nothing_in_but_the_pages_own_style_and_script(demo):
    policy, style, _, script = parts(page(demo))
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )


def test_nothing_is_named_that_could_be_loaded(demo):
    document = page(demo)
    assert set(re.findall(r"(?:src|href|action)=\"([^\"]*)\"", document)) == {"data:,"}
    assert not re.search(r"@import|url\(", document)
    addresses = set(re.findall(r"https?://[^\s\"'<]+", document))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place


def test_texts_cannot_end_the_script_or_become_markup(demo):
    hostile = "</script><script>alert(1)</script><!--"
    frame = dataclasses.replace(demo.frames[0], caption=hostile)
    document = page(dataclasses.replace(demo, frames=(frame,), texts={0: hostile}), title=f"<b>{hostile}&")
    assert document.count("</script>") == 2
    assert "<b>" not in document
    assert "alert(1)" in document
    assert json.loads(parts(document)[2])["recording"]["frames"][0]["caption"] == hostile


@pytest.mark.parametrize("step", [0, 47])
def test_a_page_cannot_begin_at_a_step_that_is_not_there(demo, step):
    with pytest.raises(pk.InvalidArgument, match="it has steps 1 to 46"):
        page(demo, step=step)
