import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from opencon.errors import DataError
from opencon.metrics import OpenWorldAccuracy
from opencon.report import figures, html
from opencon.report.embed import readable
from opencon.report.html import write_report
from tests.report.pages import HOSTILE, hostile_data, report_data, square


def written(tmp_path, data):
    return write_report(data, tmp_path / "report.html").read_text(encoding="utf-8")


def payload(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


class Reader(HTMLParser):
    """Tags, attributes and visible text, as a browser would see them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.words, self.inside = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *a) for a in attrs]
        self.inside.append(tag)

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.inside):
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicted", "given", "want"),
    [
        ([0, 1, 1, 2, 2, 3], [-1] * 6, "6 photos: 3 are things you know, 3 fall into 2 new groups"),
        ([0, 1, 1, 2, 2, 2], [-1] * 6, "6 photos: 3 are things you know, 3 fall into 1 new group"),
        ([0, 2], [-1, -1], "2 photos: 1 is a thing you know, 1 falls into 1 new group"),
        ([0, 2, 3], [0, -1, -1], "2 photos: none is a thing you know, they fall into 2 new groups"),
        ([0, 1, 0], [-1, -1, 0], "2 photos: all are things you know, no new group"),
        ([0], [-1], "1 photo: it is something you know, no new group"),
        ([3], [-1], "1 photo: it falls into 1 new group"),
        ([0, 1], [0, 1], "All 2 photos carry your label: nothing was left to discover"),
        ([0], [0], "The only photo carries your label: nothing was left to discover"),
        ([0] * 700 + [2] * 1300, [-1] * 2000, "2,000 photos: 700 are things you know, 1,300 fall into 1 new group"),
        (
            [0, 2, 3],
            [-1, -1, 0],
            "2 photos: 1 is a thing you know, 1 falls into 1 new group",
        ),  # a doubtful label is none
    ],
)
def test_headline_counts_what_had_no_label(tmp_path, predicted, given, want):
    data = report_data(photos=len(given), labeled=0, predicted=np.array(predicted), given=np.array(given))
    assert data.table.headline == want
    assert f"<h1>{want}</h1>" in written(tmp_path, data)


@pytest.mark.parametrize(
    ("predicted", "odd", "want"),
    [
        (
            [0, 1, 2, 2],
            [1, 0, 0, 0],
            "4 photos: 1 is a thing you know, 2 fall into 1 new group, 1 is unlike everything",
        ),
        ([0, 1, 2], [0, 0, 1], "3 photos: 2 are things you know, 1 is unlike everything"),
        ([2, 3, 0], [0, 0, 1], "3 photos: 2 fall into 2 new groups, 1 is unlike everything"),
        ([0, 2], [1, 1], "2 photos: 2 are unlike everything"),
    ],
)
def test_what_is_unlike_everything_belongs_to_no_class(tmp_path, predicted, odd, want):
    outlier = np.array(odd, dtype=bool)
    given = np.full(len(odd), -1)
    data = report_data(photos=len(odd), labeled=0, predicted=np.array(predicted), given=given, is_odd=outlier)
    assert data.table.headline == want
    page = written(tmp_path, data)
    bars = re.findall(r'<rect class="(?:seen|novel)" x="[\d.]+" width="([\d.]+)" height="10"/>', page)
    belong = len(odd) - sum(odd)
    assert sum(float(width) + 2 for width in bars) == pytest.approx(1000 * belong / len(odd), abs=0.2)
    galleries = payload(page)["galleries"]
    found = {(g["kind"], g["class"]): g["found"] for g in galleries}
    assert sum(n for (kind, _), n in found.items() if kind in ("seen", "new")) == belong
    assert found["outliers", -1] == sum(odd)


@pytest.mark.parametrize(
    ("confidence", "outlier", "want"),
    [
        ([0.9, 0.5, 0.9], [0, 0, 0], "None is uncertain; none is unlike everything."),
        ([0.9, 0.49, 0.9], [0, 0, 0], "1 is uncertain (the choice has less than an even chance); none is unlike"),
        (
            [0.1, 0.49, 0.9],
            [0, 0, 1],
            "2 are uncertain (the choice has less than an even chance); 1 is unlike everything.",
        ),
        ([0.1, 0.1, 0.9], [1, 1, 0], "None is uncertain; 2 are unlike everything."),  # one or the other, not both
    ],
)
def test_how_sure(tmp_path, confidence, outlier, want):
    data = report_data(photos=3, labeled=0, confidence=confidence, is_odd=outlier)
    page = written(tmp_path, data)
    assert want in Reader(page).text
    assert payload(page)["photos"]["doubt"] == [
        2 if o else int(c < 0.5) for c, o in zip(confidence, outlier, strict=True)
    ]


def test_labels_are_counted_and_doubted(tmp_path):
    predicted, given = (
        np.array([0, 0, 0, 1, 0, 1, 2, 3]),
        np.array([0, 1, 0, 1, -1, -1, -1, -1]),
    )  # the second: labeled 1
    data = report_data(photos=8, predicted=predicted, given=given)
    page = written(tmp_path, data)
    assert "Learned from 4 photos you labeled (2 classes). 1 of your labels looks doubtful." in Reader(page).text
    (doubtful,) = [g for g in payload(page)["galleries"] if g["kind"] == "doubtful"]
    assert doubtful["typical"] == [1]


def test_says_all_there_is_to_say(tmp_path):
    accuracy = OpenWorldAccuracy(all=0.875, novel=float("nan"), seen=1.0, protocol="gcd")
    text = Reader(written(tmp_path, report_data(accuracy=accuracy))).text
    for words in (
        "made-up photos",
        "Accuracy against the truth, on the unlabeled photos, protocol gcd",
        "all87.5%",
        "seen100.0%",
        "opencon name run/ names.csv",
        "It fits. Chosen: 4, of which 2 new groups; likely 3 to 6.",
        "threshold 0.5",
        "1 file could not be read and is left out.",
        "folder/broken.jpg is no image",
        "Sort more photos:opencon predict run/ more/",
        "Seed0Seconds12.5",
        "(PCA)",
    ):
        assert words in text, words
    assert "sample" not in text
    assert "nan" not in text.lower().replace("name", "")
    assert "novel" not in text.partition("protocol gcd")[2][:40]  # no photo of a novel class: nothing is said of them


def test_doubt_comes_before_the_headline(tmp_path):
    text = Reader(written(tmp_path, report_data(doubt="Take this with care: few photos. More would help."))).text
    assert "Take this with care: few photos. More would help." in text
    assert text.index("Take this with care") < text.index("60 photos" if "60 photos" in text else "50 photos")
    assert "Take this" not in Reader(written(tmp_path, report_data())).text


def test_guesses_and_twins_are_in_the_page(tmp_path):
    data = report_data()
    rows = [replace(row, looks_like="lake, 62%") if row.predicted == "new-1" else row for row in data.table.rows]
    rows[20] = replace(rows[20], twin_of="folder/photo-00012.jpg")
    page = written(tmp_path, replace(data, table=replace(data.table, rows=tuple(rows))))
    load = payload(page)
    assert load["guesses"] == [None, None, "lake, 62%", None]
    assert [i for i, twin in enumerate(load["photos"]["twin_of"]) if twin] == [20]
    assert "1 is nearly the same as another, and counted once." in Reader(page).text
    own = next(g for g in load["galleries"] if g["class"] == 0)
    assert 20 not in own["typical"]  # it shows nothing more than the other one


def test_without_estimate_problems_truth_and_threshold(tmp_path):
    page = written(tmp_path, report_data(count=None, problems=(), novelty_threshold=float("inf")))
    text = Reader(page).text
    assert "The number was given: 2 seen classes and 2 new groups." in text
    assert "Every file could be read." in text
    assert "Accuracy" not in text
    assert payload(page)["threshold"] is None


# --- galleries and samples --------------------------------------------------------------------------------------------


def test_galleries_show_the_surest_and_the_least_sure(tmp_path):
    rng = np.random.default_rng(3)
    data = report_data(photos=90, labeled=20, confidence=rng.permutation(90) / 90)
    galleries = payload(written(tmp_path, data))["galleries"]
    assert [(g["kind"], g["class"]) for g in galleries] == [("new", 2), ("new", 3), ("seen", 0), ("seen", 1)]
    for g in galleries:
        rows = [i for i in range(20, 90) if data.table[i].predicted == data.table.class_names[g["class"]]]
        by_confidence = sorted(rows, key=lambda i: -data.table[i].confidence)
        assert g["typical"] == by_confidence[:8]
        assert g["unsure"] == by_confidence[::-1][:4]
        assert (g["found"], g["labeled"]) == (len(rows), 10 if g["class"] < 2 else 0)


def test_small_groups_show_each_photo_once_and_empty_ones_not_at_all(tmp_path):
    predicted = np.array([0, 0, 1, 2, 2, 2])  # labeled 0 and 1; 1 is not found again; group 3 is empty
    data = report_data(photos=6, predicted=predicted, given=np.array([0, -1, 1, -1, -1, -1]))
    galleries = payload(written(tmp_path, data))["galleries"]
    assert [(g["class"], g["found"], g["labeled"]) for g in galleries] == [(2, 3, 0), (0, 1, 1), (1, 0, 1)]
    assert sorted(galleries[0]["typical"] + galleries[0]["unsure"]) == [3, 4, 5]
    assert galleries[2]["typical"] == [2]  # what it was given


def test_a_large_set_is_sampled_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "MAX_PICTURES", 60)
    monkeypatch.setattr(html, "MAX_PHOTOS", 100)
    asked = []
    data = report_data(photos=1000, picture=lambda i: asked.append(i) or square("red"))
    page = written(tmp_path, data)
    text, load = Reader(page).text, payload(page)
    assert "this page holds the pictures of 60 of the 1,000 photos: a sample." in text
    assert "Map and lists show 100 photos, drawn at random; all counts are of all photos." in text
    assert len(asked) == len(set(asked)) == len(load["pictures"]) == 60
    assert {len(column) for column in load["photos"].values()} == {100}
    assert sum(g["found"] for g in load["galleries"]) == 990
    files = load["photos"]["file"]
    assert files == sorted(files)
    for g in load["galleries"]:
        shown = [int(files[i][-9:-4]) for i in g["typical"]]
        rows = [i for i in range(10, 1000) if data.table[i].predicted == data.table.class_names[g["class"]]]
        best = sorted(rows, key=lambda i: -data.table[i].confidence)
        assert shown == best[: len(shown)]  # the best of all, not of the sample
        assert all(load["pictures"][str(i)] for i in g["typical"] + g["unsure"])


def test_more_classes_than_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "MAX_PICTURES", 5)
    load = payload(written(tmp_path, report_data(photos=40, seen=2, new=18)))
    assert len(load["pictures"]) == 5
    assert all(len(g["typical"]) == 1 for g in load["galleries"])


def test_fifty_thousand_photos_make_a_small_page(tmp_path):
    picture = square("red")
    path = write_report(report_data(photos=50_000, seen=5, new=5, picture=lambda i: picture), tmp_path / "a.html")
    assert path.stat().st_size < 4e6
    assert len(payload(path.read_text(encoding="utf-8"))["photos"]["file"]) == html.MAX_PHOTOS


def test_positions_keep_their_proportions(tmp_path):
    xy = np.array([[-3.0, 1.0], [7.0, 1.0], [2.0, 6.0]])
    load = payload(written(tmp_path, report_data(photos=3, xy=xy)))
    assert (load["photos"]["x"], load["photos"]["y"]) == ([0, 10_000, 5000], [0, 0, 5000])
    assert load["size"] == [10_000, 5000]
    assert payload(written(tmp_path, report_data(photos=3, xy=np.ones((3, 2)))))["size"] == [0, 0]


def test_a_photo_that_is_gone_or_torn_leaves_a_gap(tmp_path):
    (tmp_path / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n")

    def picture(i):
        return (
            None
            if i == 0
            else Image.open(tmp_path / ("gone.png" if i == 1 else "torn.png"))
            if i < 3
            else square("red")
        )

    pictures = payload(written(tmp_path, report_data(photos=4, picture=picture)))["pictures"]
    assert [bool(pictures[str(i)]) for i in range(4)] == [False, False, False, True]


# --- what comes from outside stays text -------------------------------------------------------------------------------


def test_hostile_names_add_no_markup(tmp_path):
    hostile, harmless = Reader(written(tmp_path, hostile_data())), Reader(written(tmp_path, report_data()))
    assert set(hostile.tags) <= set(harmless.tags)
    assert hostile.tags.count("script") == harmless.tags.count("script") == 2
    assert {a[:2] for a in hostile.attributes} <= {a[:2] for a in harmless.attributes}
    for name in HOSTILE:
        assert re.sub(r"\s+", " ", readable(name)) in hostile.text


def test_the_page_allows_only_its_own_script_and_loads_nothing(tmp_path):
    page = written(tmp_path, hostile_data())
    reader = Reader(page)
    (policy,) = [
        value for tag, name, value in reader.attributes if (tag, name) == ("meta", "content") and "src" in value
    ]
    rules = dict(rule.split(maxsplit=1) for rule in policy.split(";"))
    own = {}
    for element in ("style", "script"):
        (code,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        own[element] = "'sha256-" + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() + "'"
    assert rules == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": own["style"],
        "script-src": own["script"],
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    links = [value for _, name, value in reader.attributes if name in ("src", "href", "srcset", "action", "data")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not [name for _, name, _ in reader.attributes if name.startswith("on") or name == "style"]
    assert re.findall(r"https?:", page) == ["http:"]  # the SVG name space, which is only a name
    assert "@import" not in page
    assert "url(" not in page


def test_colors_are_those_of_the_figures(tmp_path):
    page = written(tmp_path, report_data())
    load = payload(page)
    assert load["colors"][: len(figures.COLORS)] == list(figures.COLORS)
    for colors in (load["colors"], load["dark_colors"]):
        assert len(colors) == len(set(colors)) == 24  # so that twenty groups have twenty colors
    assert f"--seen: {figures.SEEN}; --novel: {figures.NOVEL};" in page


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_text_stands_out_from_its_ground(tmp_path):
    """The contrast that WCAG 2.1 asks for: 4.5 for text, 3 for marks."""
    page = written(tmp_path, report_data())
    schemes = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    assert len(schemes) == 2  # light and dark
    for scheme in schemes:
        colors = {
            name: c if len(c) == 7 else "#" + "".join(2 * x for x in c[1:])
            for name, c in re.findall(r"--([\w-]+): (#[0-9a-f]+);", scheme)
        }
        for ground in ("page", "card", "tint"):
            for ink in ("ink", "soft", "seen-ink", "novel-ink"):
                assert contrast(colors[ink], colors[ground]) >= 4.5, (ink, ground)
            for mark in ("seen", "novel"):
                assert contrast(colors[mark], colors[ground]) >= 3, (mark, ground)
        assert contrast(colors["card"], colors["novel-ink"]) >= 4.5  # the button
    assert all(contrast(color, colors["card"]) >= 3 for color in html.DARK_COLORS)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_every_place_is_filled_and_the_same_data_give_the_same_bytes(tmp_path):
    page = written(tmp_path, report_data())
    assert "{{" not in page
    assert written(tmp_path, report_data()) == page
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    "case",
    [
        {"photos": 1, "labeled": 0},
        {"photos": 1, "labeled": 1},
        {"photos": 5, "labeled": 5},
        {"photos": 9, "new": 0},
        {"photos": 9, "seen": 0, "labeled": 0},
        {"novelty": np.zeros(60)},
        {"novelty_threshold": None},
    ],
    ids=str,
)
def test_odd_sets_have_a_page(tmp_path, case, recwarn):
    page = written(tmp_path, report_data(**case))
    assert "nan" not in page.partition("<script")[0].replace("nano", "")
    assert len(recwarn) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"photos": 0, "labeled": 0}, "there is no photo to report on"),
        ({"xy": np.zeros((60, 3))}, "xy has shape (60, 3), but there are 60 photos. Give two positions for each."),
        ({"xy": np.full((60, 2), np.nan)}, "xy holds entries that are not finite numbers"),
        ({"confidence": np.full(60, np.nan)}, "confidence holds entries that are not finite numbers"),
        ({"novelty": np.full(60, np.inf)}, "novelty holds entries that are not finite numbers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_input_that_does_not_fit_is_named(tmp_path, change, message):
    with pytest.raises(DataError, match=re.escape(message)):
        write_report(report_data(**change), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []
