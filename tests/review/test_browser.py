"""A person's whole path in a real browser, on real photos: `make browser`.

Chromium of the system is used (CHROMIUM names another). Where there is none, the tests are skipped, loudly.
With OPENCON_SHOTS=FOLDER every view is also drawn there, and the frames of the animation of README.md.
"""

import io
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

import opencon
from opencon.review.session import replayed
from opencon.review.take import STRANGE, taken
from tests.review.made import make_discovery

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
SHOTS = os.environ.get("OPENCON_SHOTS")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="NO BROWSER HERE: the page was not tested. Install chromium."),
]
BIRDS = os.environ.get("OPENCON_BIRDS")  # a folder of folders of photos, for the pictures of the README
LAPTOP, TABLET = {"width": 1440, "height": 860}, {"width": 1024, "height": 768}
SLOW = 180_000  # milliseconds to wait at most: machines may be busy, and nothing is timed here


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Page:
    """A page of the review, with words for what a person does."""

    def __init__(self, browser, served, *, viewport=LAPTOP, dark=False, context=None):
        scheme = "dark" if dark else "light"
        self.context = context or browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
        self.page, self.problems, self.shots = self.context.new_page(), [], 0
        self.page.set_default_timeout(SLOW)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda line: self.problems.append(line.text) if line.type == "error" else None)
        self.page.on("dialog", lambda dialog: self.problems.append(f"a dialog: {dialog.message}"))
        self.page.goto(served.link if context is None else served.base)
        if context is None:
            served.link = served._next_link()
        self.page.wait_for_selector("body.ready")

    def shot(self, name):
        if SHOTS:
            self.wait("[...document.images].every(i => i.complete || !i.src || i.loading === 'lazy')")
            self.page.screenshot(path=Path(SHOTS) / f"{name}.png")

    def facts(self):
        """What the page believes: version, place and looked of every photo, names of groups."""
        return self.page.evaluate(
            "({version: opencon.store.version, place: [...opencon.store.place], looked: [...opencon.store.looked],"
            " groups: Object.fromEntries([...opencon.store.groups].map(([id, g]) => [id, g.name]))})"
        )

    def wait(self, words):
        """Until this is true in the page. The page forbids to evaluate text in it, so the question is asked from outside."""
        end = time.monotonic() + SLOW / 1000
        while not self.page.evaluate(words):
            assert time.monotonic() < end, words
            self.page.wait_for_timeout(50)

    def until(self, version):
        self.wait(f"opencon.store.version === {version}")

    def open_group(self, name):
        self.page.locator("nav .group", has=self.page.get_by_text(name, exact=True)).first.click()

    def tiles(self):
        return self.page.locator(".tile")

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)


@pytest.fixture
def person(browser, serve):
    """person(run, ...) opens the review of a run in a page."""
    opened = []

    def start(run, **more):
        page = Page(browser, serve(run), **more)
        opened.append(page)
        return page

    yield start
    for page in opened:
        assert page.problems == []
        page.context.close()


def lasso(page, photos, film=None):
    """Draw a box around these photos' points on the map."""
    box = page.page.locator("#map").bounding_box()
    points = page.page.evaluate(
        "(photos) => { const size = 0.94 * Math.min(map.width, map.height), r = map.width / map.clientWidth;"
        " return photos.map(i => [((opencon.store.map[2 * i] - 0.5) * size + map.width / 2) / r,"
        " ((opencon.store.map[2 * i + 1] - 0.5) * size + map.height / 2) / r]); }",
        photos,
    )
    left, right = min(x for x, _ in points) - 4, max(x for x, _ in points) + 4
    top, bottom = min(y for _, y in points) - 4, max(y for _, y in points) + 4
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    mouse = page.page.mouse
    mouse.move(box["x"] + left, box["y"] + top)
    mouse.down()
    for x, y in corners[1:]:
        mouse.move(box["x"] + x, box["y"] + y, steps=6)
        if film:
            film.frame()
    mouse.up()


# --- the whole path, on real photos -----------------------------------------------------------------------------------

CLASSES, EACH, LABELED = 6, 14, 4


def real_photos(folder):
    """Birds where they are named, else pieces of the two photographs that scikit-learn brings: labeled/ and unlabeled/."""
    if BIRDS:
        kinds = sorted(path for path in Path(BIRDS).iterdir() if path.is_dir())[:: 40 // CLASSES][:CLASSES]
        photos = {kind.name.partition(".")[2].replace("_", " "): sorted(kind.iterdir())[:EACH] for kind in kinds}
        load = {name: [Image.open(path).convert("RGB") for path in paths] for name, paths in photos.items()}
    else:
        rng, load = np.random.default_rng(0), {}
        for name in ("china", "flower"):
            whole = Image.fromarray(load_sample_image(f"{name}.jpg"))
            for half, left in (("left", 0), ("right", 320)):
                corners = rng.integers(0, 120, (EACH, 2))
                load[f"{name} {half}"] = [whole.crop((left + x, y, left + x + 200, y + 200)) for x, y in corners]
    for k, (name, images) in enumerate(load.items()):
        for i, image in enumerate(images):
            is_labeled = k < len(load) // 2 and i < LABELED
            path = folder / (f"labeled/{name}" if is_labeled else "unlabeled") / f"{k}-{i:02d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, quality=92)
    return folder


@pytest.fixture(scope="module")
def discovered(tmp_path_factory):
    root = tmp_path_factory.mktemp("real")
    opencon.discover(real_photos(root / "photos"), out=root / "run", size=128, novel=3)
    return root / "run"


def test_a_whole_path(discovered, person):
    """Open, name, move by lasso, merge, split, junk, undo all, learn again, accept, sort into folders."""
    photos = discovered.parent / "photos"
    before = {path: path.read_bytes() for path in photos.rglob("*.jpg")}
    page = person(discovered)
    browse, film = page.page, Film(page)
    page.wait("opencon.store.mapKind === 'likeness'")
    start = page.facts()
    new = [int(g) for g, name in start["groups"].items() if name.startswith("new-")]
    page.shot("group")
    film.frame(3)

    browse.locator("#groupname").fill("warbler")
    film.frame(2)
    page.press("Enter")
    page.until(1)
    named = next(int(g) for g, name in page.facts()["groups"].items() if name == "warbler")
    film.frame(2)

    some = [i for i, g in enumerate(start["place"]) if g == named][:5]
    lasso(page, some, film)
    browse.wait_for_selector("#selcount")
    page.shot("lasso")
    film.frame(3)
    chosen = browse.evaluate("[...document.querySelectorAll('.tile.selected')].map(t => +t.dataset.photo)")
    assert set(some) <= set(chosen)
    page.press("1")
    page.until(2)
    assert [i for i, g in enumerate(page.facts()["place"]) if g != start["place"][i]] == sorted(
        i for i in chosen if start["place"][i] != named
    )
    film.frame(2)

    page.press("q")
    browse.wait_for_selector(".halves img")
    page.shot("same")
    film.frame(4)
    page.press("y")
    page.until(3)
    page.press("Escape")
    groups = page.facts()["groups"]
    assert len(groups) == len(start["groups"]) - 1

    place = page.facts()["place"]
    largest = max((int(g) for g in groups), key=place.count)
    page.open_group(groups[str(largest)])
    page.press("s")
    browse.wait_for_selector(".parts img")
    page.shot("split")
    film.frame(4)
    browse.get_by_role("button", name="Split into these parts").click()
    page.until(4)
    assert len(page.facts()["groups"]) == len(start["groups"])

    page.press("x", " ")
    page.until(5)
    assert page.facts()["place"].count(-1) == 1
    film.frame(2)
    for version in range(6, 11):
        page.press("Backspace")
        page.until(version)
    assert (page.facts()["place"], page.facts()["groups"]) == (start["place"], start["groups"])

    mine = next(g for g in new if start["place"].count(g) > 1)
    page.open_group(start["groups"][str(mine)])
    browse.locator("#groupname").fill("finch")
    page.press("Enter")
    page.until(11)
    page.press("g")
    page.until(12)
    film.frame(2)
    page.press("Enter")
    browse.wait_for_selector("dialog.large .why figure")
    page.shot("large")
    film.frame(4)
    page.press("Escape", "l")
    page.shot("learn")
    browse.get_by_role("button", name="Learn", exact=True).click()
    browse.get_by_role("button", name="Accept").wait_for(timeout=4 * SLOW)
    page.shot("preview")
    film.frame(4)
    browse.get_by_role("button", name="Accept").click()
    page.until(13)
    assert "finch" in page.facts()["groups"].values()
    looked = [i for i, was in enumerate(page.facts()["looked"]) if was]
    assert all(page.facts()["place"][i] == start["place"][i] for i in looked)

    page.press("?")
    page.shot("help")
    page.press("Escape", "t")
    browse.get_by_label("Hard links").check()
    browse.locator("dialog input[type=text]").fill("out")
    browse.get_by_role("button", name="Sort into folders").click()
    browse.wait_for_selector(".good")
    page.shot("take")
    film.frame(4)
    film.save()
    state = replayed(discovered)
    out = discovered / "sorted" / "out"
    assert state.place.tolist() == page.facts()["place"]
    assert {path.parent.name for path in out.rglob("*.jpg")} == {row.label or STRANGE for row in taken(state)}
    assert {path: path.read_bytes() for path in photos.rglob("*.jpg")} == before


class Film:
    """Frames of the animation of README.md, where OPENCON_SHOTS asks for them."""

    def __init__(self, page):
        self.page, self.frames = page, []

    def frame(self, tenths=1):
        """What is on the screen now, for some tenths of a second times three."""
        if SHOTS:
            self.page.page.wait_for_timeout(250)
            picture = Image.open(io.BytesIO(self.page.page.screenshot()))
            self.frames.append((picture.convert("RGB").resize((960, 573), Image.Resampling.LANCZOS), 300 * tenths))

    def save(self):
        if SHOTS:
            pictures = [picture.quantize(96, dither=Image.Dither.NONE) for picture, _ in self.frames]
            first, *rest = pictures
            durations = [duration for _, duration in self.frames]
            path = Path(SHOTS) / "review.gif"
            first.save(path, save_all=True, append_images=rest, duration=durations, loop=0, optimize=True)


@pytest.mark.skipif(not SHOTS, reason="draws pictures only where OPENCON_SHOTS names a folder")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("viewport", [LAPTOP, TABLET], ids=["laptop", "tablet"])
def test_pictures_of_every_view(discovered, person, viewport, dark):
    page = person(discovered, viewport=viewport, dark=dark)
    look = f"{'dark' if dark else 'light'}-{viewport['width']}"
    page.wait("opencon.store.mapKind === 'likeness'")
    page.shot(f"{look}-group")
    page.press("ArrowRight", "Shift+ArrowDown")
    page.shot(f"{look}-selected")
    page.press("Escape")
    for key, name in (("q", "same"), ("s", "split"), ("l", "learn"), ("t", "take"), ("?", "help"), ("Enter", "large")):
        page.press(key)
        page.page.wait_for_timeout(1200)
        page.shot(f"{look}-{name}")
        page.press("Escape")
    page.press("b")
    page.page.wait_for_timeout(600)
    page.shot(f"{look}-more")
    page.open_group("Unsure first")
    page.shot(f"{look}-unsure")
    if viewport is TABLET:
        page.press("m")
        page.page.wait_for_timeout(400)
        page.shot(f"{look}-map")


# Words whose contrast to what is behind them is below 4.5, the least of the Web Content Accessibility Guidelines (level AA).
CONTRAST = """() => {
  const part = (x) => (x /= 255) <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(part);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let n = node; n; n = n.parentElement) {
      const color = getComputedStyle(n).backgroundColor;
      if (!/, 0\\)$|transparent/.test(color)) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = [];
  for (const node of document.querySelectorAll('button, h1, h2, p, span, b, input, select')) {
    if (node.closest('.tile, .toast, [hidden], :disabled') || !node.textContent.trim() || !node.offsetParent) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) found.push(`${node.textContent.trim().slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return found;
}"""
NAMELESS = """() => {
  const kinds = 'button, input, select, a, [role=listbox], [role=option], [role=img], canvas:not([aria-hidden])';
  const hasName = (n) => n.textContent.trim() || n.getAttribute('aria-label') || n.labels?.length || n.title;
  const nameless = [...document.querySelectorAll(kinds)].filter((n) => n.offsetParent && !hasName(n));
  return nameless.map((n) => n.outerHTML.slice(0, 90));
}"""


# --- single things ----------------------------------------------------------------------------------------------------


def test_selecting_by_click_shift_ctrl_drag_and_all(run, person):
    page = person(run)
    page.open_group("cat")
    tiles, bar = page.tiles(), page.page.locator("#selcount")
    tiles.nth(1).click()
    assert bar.inner_text() == "1 photo selected"
    tiles.nth(4).click(modifiers=["Shift"])
    assert bar.inner_text() == "4 photos selected"
    tiles.nth(2).click(modifiers=["Control"])
    assert bar.inner_text() == "3 photos selected"
    page.press("Control+a")
    assert bar.inner_text() == "10 photos selected"
    page.press("Escape")
    assert bar.count() == 0
    first, last = tiles.nth(0).bounding_box(), tiles.nth(2).bounding_box()
    page.page.mouse.move(first["x"] + 20, first["y"] + 20)
    page.page.mouse.down()
    page.page.mouse.move(last["x"] + 30, last["y"] + 40, steps=5)
    page.page.mouse.up()
    assert bar.inner_text() == "3 photos selected"
    assert page.facts()["version"] == 0


def test_one_dialog_after_another_is_whole_however_quick_the_hand(run, person):
    page = person(run)
    for _ in range(5):
        page.page.evaluate(
            """() => ['?', 't', 'q', 't', '?', 't'].forEach((key) => {
              dispatchEvent(new KeyboardEvent('keydown', {key}));
              if (key !== 't') document.getElementById('dialog').close();
            })"""
        )
        page.page.wait_for_timeout(50)
        assert page.page.locator("#dialogtitle").inner_text() == "Take it with you"
        assert page.page.get_by_label("Hard links").count() == 1
        page.press("Escape")


def test_several_groups_are_merged_at_once(run, person):
    page = person(run)
    page.open_group("dog")
    for name in ("new-1", "new-2"):
        row = page.page.locator("nav .group", has=page.page.get_by_text(name, exact=True)).first
        row.click(modifiers=["Control"])
    assert page.tiles().count() > 20
    page.page.locator("#mergeall").click()
    page.until(1)
    assert page.facts()["groups"] == {"0": "cat", "1": "dog"}
    assert page.page.locator("#groupname").input_value() == "dog"
    page.press("Backspace")
    page.until(2)
    assert page.facts()["groups"] == {"0": "cat", "1": "dog", "2": "new-1", "3": "new-2"}


def test_the_keyboard_is_enough(run, person):
    page = person(run)
    page.open_group("cat")
    page.press("ArrowRight", "x", "Shift+ArrowRight")
    assert page.page.locator("#selcount").inner_text() == "2 photos selected"
    wanted = page.page.evaluate("[...document.querySelectorAll('.tile.selected')].map(t => +t.dataset.photo)")
    page.press("c")
    page.page.keyboard.type("do")
    page.press("Enter")
    page.until(1)
    assert {page.facts()["place"][i] for i in wanted} == {1}
    page.press("Backspace")
    page.until(2)
    assert {page.facts()["place"][i] for i in wanted} == {0}
    page.press("y")
    page.until(3)
    page.press("x", " ")
    page.until(4)
    assert page.facts()["place"].count(-1) == 1
    page.press("1")  # the class that was sent to last
    page.until(5)
    page.press("n")
    assert page.page.evaluate("document.activeElement.id") == "groupname"
    page.press("Escape", "?")
    assert page.page.locator("dialog").is_visible()
    page.press("Escape", "/")
    page.page.keyboard.type("IMG_0033")
    page.wait("document.querySelectorAll('.tile').length === 1")
    page.press("Escape", "]", "g")
    page.until(6)
    page.press("Enter")
    page.page.wait_for_selector("dialog.large .why figure")
    page.press("ArrowRight", "Escape")


def test_the_map_and_the_grid_select_the_same(run, person):
    page = person(run)
    page.wait("opencon.store.map !== null")
    page.wait("opencon.store.mapKind === 'likeness'")
    lasso(page, list(range(30, 40)))
    page.page.wait_for_selector("#selcount")
    on_map = page.page.evaluate(
        "[...document.querySelectorAll('.tile.selected')].map(t => +t.dataset.photo).sort((a, b) => a - b)"
    )
    assert set(range(30, 40)) <= set(on_map)
    inside = page.page.locator("#selcount").inner_text()
    assert inside == f"{len(on_map)} photos selected"


def test_hostile_names_do_nothing(tmp_path, person):
    names = ("<img src=x onerror=alert(1)>", "'\"><svg onload=alert(2)>", "new-1", "new-2")
    files = [f"IMG_{i:04d}.jpg" for i in range(39)] + ["<b onmouseover=alert(3)>.jpg"]
    run = make_discovery(tmp_path, names=names, files=files)
    page = person(run)
    page.open_group(names[0])
    page.press("n", "Control+a")
    page.page.keyboard.type("<script>alert(4)</script>")
    page.press("Enter")
    page.until(1)
    assert page.facts()["groups"]["0"] == "<script>alert(4)</script>"
    page.press("q")
    page.page.wait_for_selector("dialog")
    page.press("Escape", "t", "Escape", "/")
    page.page.keyboard.type("onmouseover")
    page.wait("document.querySelectorAll('.tile').length === 1")
    page.press("Escape")
    page.page.locator(".tile").first.dblclick()
    page.page.wait_for_selector("dialog.large")
    assert "<b onmouseover=alert(3)>.jpg" in page.page.locator("#dialogtitle").inner_text()
    assert (
        page.page.evaluate("document.querySelectorAll('svg, script:not([src]), b[onmouseover], img[src=x]').length")
        == 0
    )


def test_two_tabs_agree_without_loading_again(run, browser, serve):
    served = serve(run)
    one = Page(browser, served)
    two = Page(browser, served, context=one.context)
    one.open_group("cat")
    one.tiles().nth(0).click()
    one.press("2")
    one.until(1)
    two.until(1)
    assert one.facts() == two.facts()
    two.press("Backspace")
    one.until(2)
    assert one.facts() == two.facts()
    assert one.problems == two.problems == []
    one.context.close()


def test_a_page_that_lost_its_program_says_so(run, browser, serve):
    served = serve(run)
    page = Page(browser, served)
    page.open_group("cat")
    page.tiles().nth(0).click()
    served.process.kill()
    served.process.wait()
    page.press("2")
    page.page.wait_for_selector(".toast.bad")
    assert "does not answer" in page.page.locator("#toast").inner_text()
    assert page.facts()["place"][:10] == [0] * 10  # the screen does not say what is not on the disk
    page.context.close()


@pytest.mark.parametrize("viewport", [LAPTOP, TABLET, {"width": 600, "height": 900}], ids=["laptop", "tablet", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_sticks_out_and_text_can_be_read(run, person, viewport, dark):
    page = person(run, viewport=viewport, dark=dark)
    assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.press("Control+a")
    poor = page.page.evaluate(CONTRAST)
    assert poor == []


def test_everything_has_a_name_and_a_place_for_a_screen_reader(run, person):
    page = person(run)
    page.press("x")
    nameless = page.page.evaluate(NAMELESS)
    assert nameless == []
    grid = page.page.locator("#grid")
    active = grid.get_attribute("aria-activedescendant")
    assert page.page.locator(f"#{active}").get_attribute("aria-selected") == "true"
    assert page.page.locator(f"#{active}").get_attribute("aria-setsize") == "10"
    page.press("ArrowRight")
    assert "2 of 10" in page.page.locator("#spoken").text_content()
    assert page.page.evaluate("document.querySelectorAll('main, nav, header, aside, h1').length") == 5
