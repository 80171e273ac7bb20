"""The report page in a real browser, offline. Skipped where playwright or a Chromium is missing."""

import csv
import io
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from opencon.report.embed import readable
from opencon.report.html import write_report
from tests.report.pages import HOSTILE, hostile_data, report_data

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

LAPTOP = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        system = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            started = p.chromium.launch(executable_path=system, args=["--no-sandbox"])
        except playwright.Error as err:
            pytest.skip(f"no Chromium to start: {str(err).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Open a report without a network; afterwards nothing may have been complained about or asked for."""
    contexts, complaints, asked = [], [], []

    def open_page(data, path=None, **options):
        if path is None:
            path = write_report(data, tmp_path / "report.html")
        context = browser.new_context(**(LAPTOP | options), offline=True)
        contexts.append(context)
        context.set_default_timeout(10_000)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: complaints.append("dialog") or dialog.dismiss())
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url[:80] for url in asked if not url.startswith(("file:", "data:image/jpeg", "blob:", "data:,"))] == []


def on_map(page, photo):
    """Scroll to the map; where in the window a photo of it lies."""
    page.evaluate("document.getElementById('map').scrollIntoView({ behavior: 'instant' })")
    box = page.locator("#canvas").bounding_box()
    x, y = page.evaluate(f"place({photo})")
    return box["x"] + x, box["y"] + y


def painted(page):
    """How many pixels of the map are not background, with pointer and buttons out of the way."""
    page.mouse.move(2, 2)
    page.evaluate("draw(); document.querySelector('.zoom').style.visibility = 'hidden'")
    with Image.open(io.BytesIO(page.locator("#canvas").screenshot())) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    page.evaluate("document.querySelector('.zoom').style.visibility = ''")
    return int((np.abs(pixels - pixels[pixels.shape[0] // 2, 3]).max(axis=2) > 20).sum())


@pytest.mark.parametrize(
    ("data", "screen", "scheme"),
    [
        (report_data, LAPTOP, "light"),
        (report_data, PHONE, "dark"),
        (hostile_data, LAPTOP, "dark"),
        (hostile_data, PHONE, "light"),
    ],
    ids=["laptop-light", "phone-dark", "hostile-laptop-dark", "hostile-phone-light"],
)
def test_fits_the_screen_in_light_and_dark(visit, tmp_path, data, screen, scheme):
    page = visit(data(), **screen, color_scheme=scheme)
    for more in page.locator(".more").all():
        more.click()
    assert page.evaluate("document.documentElement.scrollWidth") == screen["viewport"]["width"]
    page.locator(".photo:visible").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") == screen["viewport"]["width"]
    page.keyboard.press("Escape")
    page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
    page.screenshot(path=tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as image:
        corner = image.convert("L").getpixel((2, 2))
    assert corner > 230 if scheme == "light" else corner < 40
    assert painted(page) > 500  # the map is drawn


@pytest.mark.parametrize("screen", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_hostile_names_run_nothing_and_are_shown_as_they_are(visit, screen):
    page = visit(hostile_data(), **screen)
    for more in page.locator(".more").all():
        more.click()
    for i in range(len(HOSTILE)):
        page.evaluate(f"show({i})")
        assert page.locator("#tip").inner_text().count(readable(HOSTILE[i]).strip()) >= 1
        page.evaluate(f"openDialog([{i}], 0)")
        shown = page.evaluate("[...document.querySelectorAll('#about dd')].map((dd) => dd.textContent)")
        assert shown[0] == readable(HOSTILE[i])
    page.keyboard.press("Escape")
    names = page.evaluate("[...document.querySelectorAll('article h3')].map((h) => h.textContent)")
    assert sorted(names) == sorted(map(readable, HOSTILE[:6]))
    page.locator("#new input").first.fill(HOSTILE[1])
    assert readable(HOSTILE[1]) in page.evaluate("document.getElementById('legend').textContent")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('img[src=x], svg[onload]').length") == 0
    assert page.evaluate("document.scripts.length") == 2
    page.evaluate("unsaved = false")


def test_the_policy_stops_a_script_that_would_get_in(browser, tmp_path):
    """The last wall: were a name taken for markup, its code still would not run."""
    path = write_report(report_data(), tmp_path / "report.html")
    markup = "<script>window.hacked=1</script><img src=data:, onerror=window.hacked=1><style>body{width:9px}</style>"
    path.write_text(path.read_text(encoding="utf-8").replace("<main>", "<main>" + markup), encoding="utf-8")
    page = browser.new_page()
    refused = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(path.as_uri())
    page.wait_for_timeout(50)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.body.clientWidth") > 100
    assert len([text for text in refused if "Content Security Policy" in text]) == 3
    page.close()


def test_pointing_at_the_map_shows_the_photo_and_clicking_opens_it(visit):
    data = report_data()
    page = visit(data)
    assert page.locator("#tip").is_hidden()
    x, y = on_map(page, 17)
    page.mouse.move(x, y)
    tip = page.locator("#tip")
    i = page.evaluate("here")  # 17, or one that lies on it
    assert np.linalg.norm(np.subtract(page.evaluate(f"place({i})"), page.evaluate("place(17)"))) < 1
    text = tip.inner_text()
    assert data.table[i].file in text
    assert data.table[i].closest in text
    assert f"{int(100 * round(data.table[i].confidence, 4))}%" in text
    assert page.evaluate("tip.querySelector('img').naturalWidth") == 60
    box, field = tip.bounding_box(), page.locator("#canvas").bounding_box()
    assert field["x"] <= box["x"]
    assert box["x"] + box["width"] <= field["x"] + field["width"]
    page.mouse.click(x, y)
    assert data.table[i].file in page.locator("#about").inner_text()
    page.get_by_role("button", name="Close").click()
    assert page.locator("#dialog").is_hidden()
    page.mouse.move(5, 5)
    assert tip.is_hidden()


def test_tapping_the_map_shows_the_photo(visit):
    page = visit(report_data(), **PHONE)
    page.touchscreen.tap(*on_map(page, 17))
    assert page.locator("#tip").is_visible()
    assert page.locator("#dialog").is_hidden()
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390


def test_the_map_can_be_used_by_keyboard(visit):
    data = report_data()
    page = visit(data)
    page.locator("#canvas").focus()
    page.keyboard.press("ArrowRight")
    assert data.table[0].file in page.locator("#tip").inner_text()  # class by class, then by number
    page.keyboard.press("ArrowRight")
    assert data.table[2].file in page.locator("#tip").inner_text()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert data.table[0].file in page.locator("#about").inner_text()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "canvas"


def test_the_legend_hides_classes_and_the_zoom_brings_them_closer(visit):
    page = visit(report_data())
    apart = "Math.hypot(place(20)[0] - place(21)[0], place(20)[1] - place(21)[1])"
    before, drawn = page.evaluate(apart), painted(page)
    entry = page.locator("#legend .entry").first
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    assert 0.3 * drawn < painted(page) < 0.9 * drawn
    x, y = on_map(page, 12)  # of the hidden class
    page.mouse.move(x, y)
    assert page.evaluate("here < 0 || shownAs(here)") != 2
    page.get_by_role("button", name="Hide all").click()
    assert painted(page) == 0
    page.get_by_role("button", name="Show all", exact=True).click()
    page.get_by_role("button", name="Zoom in").click()
    assert page.evaluate(apart) == pytest.approx(1.6 * before)
    page.get_by_role("button", name="Zoom out").click()
    assert page.evaluate(apart) == pytest.approx(before)


def test_the_map_has_its_size_before_the_browser_tells_it(visit):
    page = visit(report_data())
    page.add_init_script("window.ResizeObserver = class { observe() {} }")  # as late as can be
    page.reload()
    assert page.evaluate("W") == page.evaluate("canvas.clientWidth") > 300
    assert painted(page) > 500


def test_names_come_back_as_a_table(visit, tmp_path):
    page = visit(report_data(new=3))
    save = page.get_by_role("button", name="Save names.csv")
    assert save.is_disabled()
    page.get_by_label("Name for new-1").fill('otters, "sea" 🦦')
    page.get_by_label("Name for new-3").fill("  kelp ")
    page.get_by_label("Name for new-2").fill(" ")
    assert "2 of 3 groups named" in page.locator("#named").inner_text()
    assert 'otters, "sea" 🦦 (new-1)' in page.locator("#legend").inner_text()
    with page.expect_download() as download:
        save.click()
    assert download.value.suggested_filename == "names.csv"
    download.value.save_as(tmp_path / "names.csv")
    with (tmp_path / "names.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [tuple(row.values()) for row in rows]
    assert found == [("new-1", 'otters, "sea" 🦦', "0123abcd"), ("new-3", "kelp", "0123abcd")]
    assert list(rows[0]) == ["group", "name", "discovery"]


def test_typed_names_outlive_the_page_for_the_same_discovery_alone(visit, tmp_path):
    page = visit(report_data(new=3))
    page.get_by_label("Name for new-3").fill("kelp")
    page.reload()  # the browser does not ask: nothing would be lost
    assert page.get_by_label("Name for new-3").input_value() == "kelp"
    assert "1 of 3 groups named" in page.locator("#named").inner_text()
    assert "kelp (new-3)" in page.locator("#legend").inner_text()
    assert page.get_by_role("button", name="Save names.csv").is_enabled()
    page.get_by_label("Name for new-3").fill("")
    page.reload()
    assert page.get_by_label("Name for new-3").input_value() == ""
    page.get_by_label("Name for new-3").fill("kelp")
    write_report(replace(report_data(new=3), names_for="another"), tmp_path / "report.html")
    page.reload()
    assert page.get_by_label("Name for new-3").input_value() == ""


def test_where_a_browser_keeps_nothing_it_asks_before_names_are_lost(browser, tmp_path):
    context = browser.new_context(offline=True)
    context.set_default_timeout(10_000)
    context.add_init_script(
        "delete window.localStorage; Object.defineProperty(window, 'localStorage', { value: null })"
    )
    page, asked = context.new_page(), []
    page.on("dialog", lambda dialog: asked.append(dialog.type) or dialog.accept())
    page.goto(write_report(report_data(new=3), tmp_path / "report.html").as_uri())
    page.get_by_label("Name for new-3").press_sequentially("kelp")
    assert "1 of 3 groups named" in page.locator("#named").inner_text()
    page.reload()
    assert asked == ["beforeunload"]
    context.close()


def test_where_no_command_takes_names_none_are_asked_for(visit):
    page = visit(replace(report_data(new=3), names_command=""))
    assert page.get_by_text("new-1").first.is_visible()
    assert page.get_by_label("Name for new-1").count() == 0
    assert not page.get_by_role("button", name="Save names.csv").is_visible()


def test_a_gallery_opens_to_all_its_photos(visit):
    data = report_data(photos=90)
    page = visit(data)
    card = page.locator("#new .card").first
    assert card.locator(".photo").count() == 12
    card.get_by_role("button", name="Show all").click()
    files = [photo.get_attribute("title") for photo in card.locator(".photo:visible").all()]
    rows = [i for i in range(10, 90) if data.table[i].predicted == "new-1"]
    surest = sorted(rows, key=lambda i: -round(data.table[i].confidence, 4))
    assert files == [data.table[i].file for i in surest]
    card.get_by_role("button", name="Show fewer").click()
    assert card.locator(".photo:visible").count() == 12


def test_every_picture_has_words_and_every_control_a_name(visit):
    page = visit(report_data(photos=30, picture=lambda i: None if i == 20 else Image.new("RGB", (8, 8))))
    assert page.evaluate("[...document.images].every((image) => image.alt.includes('photo-'))")
    named = "(e) => e.textContent.trim() || e.ariaLabel || e.querySelector('img')"
    assert page.evaluate(f"[...document.querySelectorAll('button, input, a')].every({named})")
    assert "no picture" in page.locator("#new").inner_text() + page.locator("#seen").inner_text()


def test_ten_thousand_photos_on_the_map_stay_quick_to_point_at(visit):
    picture = Image.new("RGB", (8, 8))
    page = visit(report_data(photos=12_000, seen=10, new=10, picture=lambda i: picture))
    assert page.evaluate("N") == 10_000
    page.mouse.move(*on_map(page, 5000))
    assert page.locator("#tip").is_visible()
    assert "of the 12,000 photos: a sample" in page.locator("main").inner_text()
    assert page.locator("#new .more").first.inner_text().startswith("Show ")


def test_without_scripts_the_outcome_can_still_be_read(visit):
    page = visit(report_data(), java_script_enabled=False)
    text = page.locator("body").inner_text()
    assert "50 photos: " in text
    assert "Galleries and map need JavaScript" in text
    assert "opencon predict run/ more/" in text


def test_two_groups_with_the_same_guess_do_not_become_one(visit):
    data = report_data()
    rows = [
        replace(row, looks_like="lake, 62%") if str(row.predicted)[:4] == "new-" else row for row in data.table.rows
    ]
    page = visit(replace(data, table=replace(data.table, rows=tuple(rows))))
    page.get_by_role("button", name="Take all guesses").click()
    fields = page.get_by_role("textbox").all()
    assert [field.input_value() for field in fields if field.input_value()] == ["lake", "lake 2"]
