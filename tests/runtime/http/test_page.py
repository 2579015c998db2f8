"""The page at `/`: what it is made of, what `/deployment` tells it, and, where there is a Chromium, what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

import pytest
from support.browser import Browser, Tab, browsing, find_browser
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import Deployment
from support.scripted_http import Served, serving
from support.waiting import eventually
from support.whole_deployment import whole_deployment

from headwise.runtime.http.guard import ApiKeys
from headwise.runtime.protocol.users import Users

KEY = "sk-0123456789"
PATHS = {"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css"}
GROUPS = (("group 0", "full attention"), ("groups 1 to 5", "window of 512 each"))


@pytest.fixture(scope="module")
def whole() -> Iterator[Served]:
    with whole_deployment() as deployment, serving(deployment, groups=GROUPS) as served:
        yield served


# ---- files and their headers ----


@pytest.mark.parametrize(("path", "kind"), PATHS.items())
def test_the_page_may_load_only_what_is_its_own(whole: Served, path: str, kind: str) -> None:
    response = whole.http.get(path)
    assert (response.status_code, response.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    assert {policy.pop(name) for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy.pop("img-src") == "data:"
    assert set(policy.values()) == {"'none'"}
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


def test_the_page_names_no_other_place_and_has_nothing_inline(whole: Served) -> None:
    html, script = whole.http.get("/").text, whole.http.get("/page.js").text
    assert set(re.findall(r'(?:src|href)="([^"]*)"', html)) == {"page.js", "page.css", "data:,"}
    assert not re.search(r"<style|\son\w+=|\sstyle=|<script(?! src)", html)
    assert set(re.findall(r"https?://[^\"]*", html + script)) == {"http://www.w3.org/2000/svg"}, "a name, not a place"
    forbidden = (
        "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval|Function\\(|localStorage|sessionStorage|cookie"
    )
    assert not re.search(forbidden, script)


def test_the_package_brings_the_page() -> None:
    names = {path.name for path in (files("headwise.runtime.http") / "assets").iterdir()}
    assert names == {"page.html", "page.js", "page.css"}


def test_the_page_needs_no_key_and_all_it_shows_does(deployment: Deployment) -> None:
    with serving(deployment, keys=ApiKeys(Users({KEY: None}))) as served:
        assert {served.http.get(path).status_code for path in PATHS} == {200}
        assert served.http.get("/deployment").status_code == 401
        bearing = {"authorization": f"Bearer {KEY}"}
        assert served.http.get("/deployment", headers=bearing).status_code == 200
        assert served.http.post("/", headers=bearing).status_code == 405


# ---- what it is told ----


def test_the_page_is_told_of_engines_tiers_groups_and_routes(whole: Served) -> None:
    told = whole.http.get("/deployment").json()
    assert (told["model"], told["groups"]) == ("scripted", [list(group) for group in GROUPS])
    assert told["routing"]["decisions"] == {"no_hit": 2}
    (engine,) = told["engines"]
    assert (engine["name"], engine["state"], engine["tokens"]) == ("engine-0", "awake", 8)
    assert engine["queried_tokens"] >= engine["hit_tokens"]["device"] > 0
    assert sum(engine["pools"]["device"].values()) == sum(engine["pools"]["host"].values()) == 32
    assert engine["stored_blocks"] > 0
    assert engine["copied_bytes"]["store"] > 0


def test_the_page_is_told_no_address(whole: Served) -> None:
    assert "127.0.0.1" not in whole.http.get("/deployment").text


def test_an_engine_that_is_starting_has_no_numbers() -> None:
    deployment = Deployment()
    deployment.add_engine(None)
    with serving(deployment) as served:
        (engine,) = served.http.get("/deployment").json()["engines"]
    deployment.close()
    assert engine == {"name": "engine-0", "state": "starting", "restarts": 0}


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with browsing(path) as browser:
        yield browser


def tab_at(browser: Browser, served: Served) -> Tab:
    tab = browser.tab()
    tab.open(served.base_url)
    eventually(lambda: tab.text("#status") not in ("", "connecting"))
    return tab


def test_a_browser_shows_the_deployment_and_streams_an_answer(browser: Browser, whole: Served) -> None:
    tab = tab_at(browser, whole)
    eventually(lambda: tab.text("#status") == "live")
    assert tab.text("#model") == "scripted"
    assert tab.text("#engines tbody td:first-child") == "engine-0"
    assert "window of 512" in tab.text("#groups")
    assert "no hit" in tab.text("#routes")
    assert "device" in tab.text("#hits")
    tab.evaluate("document.querySelector('#max-tokens').value = '4'")
    tab.write("#prompt", "!!!!!!!!!!!!")
    tab.click("#send")
    eventually(lambda: "4 generated" in tab.text("#timing"), otherwise=lambda: tab.text("#timing"))
    assert len(tab.text("#answer")) == 4
    assert tab.problems == []


def test_texts_of_others_are_never_html(browser: Browser, deployment: Deployment, core: ScriptedCore) -> None:
    evil = "<img src=x onerror=\"document.title='bad'\"><b>bold</b>"
    with serving(deployment, model=evil, groups=((evil, evil),)) as served:
        tab = tab_at(browser, served)
        eventually(lambda: tab.text("#model") == evil)
        assert tab.text("#groups dt") == tab.text("#groups dd") == evil
        assert tab.evaluate("document.querySelectorAll('img, b b, dd *').length") == 0
        with pytest.raises(RuntimeError, match="TrustedHTML"):
            tab.evaluate("document.body.innerHTML = '<b>x</b>'")


def test_a_browser_asks_for_the_key_and_forgets_it(
    browser: Browser, deployment: Deployment, core: ScriptedCore
) -> None:
    with serving(deployment, keys=ApiKeys(Users({KEY: None}))) as served:
        tab = tab_at(browser, served)
        assert tab.text("#status") == "give an API key"
        assert not tab.evaluate("document.querySelector('#main').checkVisibility()")
        for key, status in (("sk-of-nobody", "this key is not known"), (KEY, "live")):
            tab.write("#key", key)
            tab.click("#ask-key button")
            eventually(lambda status=status: tab.text("#status") == status)
        assert not tab.evaluate("document.querySelector('#ask-key').checkVisibility()")
        assert KEY not in tab.evaluate("document.documentElement.outerHTML + document.querySelector('#key').value")
        assert tab.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.href]") == [
            *(0, 0, "", f"{served.base_url}/")
        ]
        tab.call("Page.reload")
        eventually(lambda: tab.text("#status") == "give an API key")


def test_an_answer_can_be_stopped(browser: Browser, deployment: Deployment, core: ScriptedCore) -> None:
    core.pace_s = 0.02
    with serving(deployment) as served:
        tab = tab_at(browser, served)
        tab.evaluate("document.querySelector('#max-tokens').value = '100000'")
        tab.write("#prompt", "count")
        tab.click("#send")
        eventually(lambda: "3 " in tab.text("#answer"))
        aborted = len(core.aborted)
        tab.click("#stop")
        eventually(lambda: len(core.aborted) > aborted)
        eventually(lambda: tab.text("#timing") == "stopped")
        assert not tab.evaluate("document.querySelector('#send').disabled")


def test_a_request_that_is_refused_is_told_in_the_server_s_words(
    browser: Browser, deployment: Deployment, core: ScriptedCore
) -> None:
    with serving(deployment) as served:
        tab = tab_at(browser, served)
        tab.evaluate("document.querySelector('#temperature').value = '-1'")
        tab.evaluate("document.querySelector('#prompt').value = 'a'")
        tab.evaluate("document.querySelector('#try').noValidate = true")
        tab.click("#send")
        eventually(lambda: "temperature" in tab.text("#timing"))
