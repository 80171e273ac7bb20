"""Named data sets of photos, on small made-up trees that are laid out like the official ones."""

import io
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from opencon.config import DataConfig, EncoderConfig, EvalConfig, RunConfig, SplitConfig, TrainConfig
from opencon.data.benchmarks import DATASETS, IMAGENET_MEAN, dataset_info, load_dataset
from opencon.data.layouts import car_names, class_order
from opencon.data.streaming import StreamedImages
from opencon.errors import DataError
from opencon.experiments.recipes import SETTINGS
from opencon.experiments.train import train
from opencon.methods import OpenConConfig

COUNTS = {  # seen, novel
    "imagenet100": (50, 50),
    "cub200": (100, 100),
    "stanford_cars": (98, 98),
    "herbarium19": (341, 342),
    "fgvc_aircraft": (50, 50),
}
NAMES = [*COUNTS, "imagenet1k"]


def jpeg(color=(200, 90, 30), size=(12, 10)):
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "JPEG")
    return buffer.getvalue()


PHOTOS = [jpeg((30 * i, 200 - 20 * i, 90)) for i in range(8)]


def put(path, i=0):
    """One of eight photos, at this place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PHOTOS[i % 8])
    return str(path)


# --- made-up trees: each returns what is true, {file: class}, of the training and of the test images -------------------


def imagenet(root, wnids, num_train=2):
    return [
        {
            put(root / part / wnid / f"{wnid}_{i}.JPEG", c + i): wnid
            for c, wnid in enumerate(wnids)
            for i in range(count)
        }
        for part, count in (("train", num_train), ("val", 1))
    ]


def imagenet100(root):
    order = class_order("imagenet100")
    more = ["n00000001", "n99999999"]  # the other 900 may lie beside them
    truth = imagenet(root, [*order.seen, *order.novel, *more])
    return [{file: wnid for file, wnid in part.items() if wnid not in more} for part in truth]


def imagenet1k(root):
    return imagenet(root, [f"n{7 * c:08d}" for c in range(1000)], num_train=1)


def cub200(root, num_train=2):
    place = root / "CUB_200_2011"
    truth = [{}, {}]
    lines = {"images.txt": [], "image_class_labels.txt": [], "train_test_split.txt": []}
    number = 0
    for c in range(1, 201):
        name = f"{c:03d}.Bird {c}" if c == 7 else f"{c:03d}.Bird_{c}"
        for i in range(num_train + 1):
            number += 1
            is_test = i == 1
            file = f"{name}/{name}_{i}.jpg"
            truth[is_test][put(place / "images" / file, number)] = name
            lines["images.txt"].append(f"{number} {file}")
            lines["image_class_labels.txt"].append(f"{number} {c}")
            lines["train_test_split.txt"].append(f"{number} {int(not is_test)}")
    for file, content in lines.items():
        (place / file).write_text("\n".join(content) + "\n")
    return truth


def write_annotations(path, files, classes):
    rows = np.zeros((1, len(files)), dtype=[(n, object) for n in ("bbox_x1", "bbox_y1", "bbox_x2", "class", "fname")])
    for i, (file, c) in enumerate(zip(files, classes, strict=True)):
        rows[0, i] = (1, 2, 3, c, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"annotations": rows})


def stanford_cars(root, images="cars_{}", test_labels="cars_test_annos_withlabels.mat"):
    place, truth = root / "stanford_cars", []
    for part, annotations in (("train", "devkit/cars_train_annos.mat"), ("test", test_labels)):
        classes = [*range(1, 197), 3, 196]
        random.Random(part).shuffle(classes)
        files = [f"{i:05d}.jpg" for i in range(1, len(classes) + 1)]
        folder = place / images.format(part)
        truth.append({put(folder / f, c): car_names()[c - 1] for f, c in zip(files, classes, strict=True)})
        write_annotations(place / annotations, files, classes)
    return truth


def cars_in_folders(root):
    return [
        {put(root / part / name.replace("/", "-") / f"{i}.jpg"): name for name in car_names() for i in range(2)}
        for part in ("train", "test")
    ]


def herbarium19(root):
    return [
        {put(root / part / str(c) / f"{i}.jpg", c + i): str(c) for c in range(683) for i in range(count)}
        for part, count in (("small-train", 1), ("small-validation", 1))
    ]


VARIANTS = [f"{maker} {c}" for maker in ("Cessna", "707", "F/A", "CRJ") for c in range(25)]


def fgvc_aircraft(root):
    place, lines = root / "fgvc-aircraft-2013b" / "data", {}
    truth = [{}, {}]
    for p, part in enumerate(("train", "val", "test")):
        lines[part] = []
        for c, variant in enumerate(VARIANTS):
            image = f"{p}{c:04d}"
            truth[part == "test"][put(place / "images" / f"{image}.jpg")] = variant
            lines[part].append(f"{image} {variant}")
        (place / f"images_variant_{part}.txt").write_text("\n".join(lines[part]) + "\n")
    (place / "variants.txt").write_text("\n".join(VARIANTS) + "\n")
    return truth


MAKE = {
    make.__name__: make
    for make in (imagenet100, imagenet1k, cub200, stanford_cars, cars_in_folders, herbarium19, fgvc_aircraft)
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A tree by the name of its maker, made once: (its root, what is true). Not to be changed."""
    made = {}

    def get(name):
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            made[name] = (root, MAKE[name](root))
        return made[name]

    return get


def mirror(source, target, depth=1):
    """A tree that may be changed: its files copied, its folders linked from this depth on."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.is_file():
            shutil.copy(entry, target)
        elif depth:
            mirror(entry, target / entry.name, depth - 1)
        else:
            (target / entry.name).symlink_to(entry)
    return target


def config(name, root, **settings):
    return DataConfig(name=name, root=str(root), **{"image_size": 8, **settings})


def assert_true(images, truth):
    assert dict(zip(images.files, (images.class_names[c] for c in images.classes), strict=True)) == truth


# --- the lists --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTS)
def test_a_list_has_the_published_numbers_of_classes(name):
    order = class_order(name)
    assert (len(order.seen), len(order.novel)) == COUNTS[name]
    assert len({*order.seen, *order.novel}) == sum(COUNTS[name]) == DATASETS[name].info.num_classes
    if name == "imagenet100":
        assert all(len(wnid) == 9 and wnid[0] == "n" and wnid[1:].isdigit() for wnid in order.seen + order.novel)
        assert (order.seen[0], order.seen[-1], order.novel[0]) == ("n01558993", "n03272010", "n03291819")
    else:
        assert {int(c) for c in order.seen + order.novel} == set(range(sum(COUNTS[name])))


def test_the_names_of_cars_are_in_the_order_of_the_devkit():
    names = car_names()
    assert len(set(names)) == len(names) == 196
    assert names[:2] == ("AM General Hummer SUV 2000", "Acura RL Sedan 2012")
    assert names[5] == "Acura Integra Type R 2001"  # the sixth there, the second in the alphabet
    assert names[173] == "Ram C/V Cargo Van Minivan 2012"
    assert names[195] == "smart fortwo Convertible 2012"


def test_they_are_registered_wherever_one_enters():
    code = "from opencon.data.benchmarks import DATASETS; print(*DATASETS.names())"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert set(NAMES) <= set(found)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_known_without_files(name):
    info = DATASETS[name].info
    assert (info.channels, info.image_size, info.mean) == (3, 224, IMAGENET_MEAN)
    assert info.num_train > info.num_test > 0


def test_the_table_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8").replace(",", "")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) / (\d+) \| (\d+) / (\d+) \| `(\w+)` \|", text, re.M)
    assert {name for name, *_ in rows} == set(NAMES)
    for name, num_classes, num_seen, num_novel, num_train, num_test, protocol in rows:
        info, setting = DATASETS[name].info, SETTINGS[name]
        assert (info.num_classes, info.num_train, info.num_test) == (int(num_classes), int(num_train), int(num_test))
        assert (setting.num_seen, info.num_classes - setting.num_seen) == (int(num_seen), int(num_novel))
        assert setting.protocol == protocol


# --- the official layouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_files_and_classes(name, tree, monkeypatch):
    root, (train_truth, test_truth) = tree(name)
    given = config(name, root)
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", None)  # looking decodes nothing
        info = dataset_info(given)
    assert (info.num_train, info.num_test, info.image_size) == (len(train_truth), len(test_truth), 8)
    data = load_dataset(given)
    assert data.info == info
    assert_true(data.train, train_truth)
    assert_true(data.held_out(), test_truth)
    assert data.train.class_names == data.held_out().class_names
    assert data.train.images.shape == (len(train_truth), 3, 8, 8)
    assert set(data.train.class_names) == set(train_truth.values())


@pytest.fixture
def seen_and_novel(tree):
    def names(name, maker=None):
        order = load_dataset(config(name, tree(maker or name)[0], memory_gb=0.0)).train.class_names
        return order[: COUNTS[name][0]], order[COUNTS[name][0] :]

    return names


def test_seen_classes_come_first_in_cub(seen_and_novel):
    seen, novel = seen_and_novel("cub200")
    assert seen[:4] == ("001.Bird_1", "006.Bird_6", "008.Bird_8", "010.Bird_10")  # 0 5 7 9
    assert novel[:5] == ("002.Bird_2", "003.Bird_3", "004.Bird_4", "005.Bird_5", "007.Bird 7")  # 1 2 3 4 6
    assert (seen[-1], novel[-1]) == ("200.Bird_200", "196.Bird_196")


@pytest.mark.parametrize("maker", ["stanford_cars", "cars_in_folders"])
def test_seen_classes_come_first_in_cars(maker, seen_and_novel):
    seen, novel = seen_and_novel("stanford_cars", maker)
    assert seen[1:4] == ("Acura RL Sedan 2012", "Acura TL Sedan 2012", "Aston Martin V8 Vantage Convertible 2012")
    assert novel[:3] == ("Acura TL Type-S 2008", "Acura TSX Sedan 2012", "Acura Integra Type R 2001")
    assert (seen[-1], novel[-1]) == ("smart fortwo Convertible 2012", "Volkswagen Golf Hatchback 1991")


def test_seen_classes_come_first_in_herbarium(seen_and_novel, tree):
    seen, novel = seen_and_novel("herbarium19")
    folders = sorted(os.listdir(tree("herbarium19")[0] / "small-train"))
    assert folders[:4] == ["0", "1", "10", "100"]  # as text
    assert seen[:4] == ("0", "1", "100", folders[6])  # 0 1 3 6
    assert novel[0] == "10"  # 2


def test_seen_classes_come_first_in_aircraft(seen_and_novel):
    seen, novel = seen_and_novel("fgvc_aircraft")
    names = sorted(VARIANTS)
    assert names[0] == "707 0"  # a number before any letter
    assert names != VARIANTS
    assert seen[:7] == (*names[:6], names[10])  # 0 1 2 3 4 5 10
    assert novel[0] == names[6]


def test_seen_classes_of_imagenet(seen_and_novel, tree):
    seen, novel = seen_and_novel("imagenet100")
    assert (seen, novel) == (class_order("imagenet100").seen, class_order("imagenet100").novel)
    names = load_dataset(config("imagenet1k", tree("imagenet1k")[0], memory_gb=0.0)).train.class_names
    assert names == tuple(sorted(names))
    assert names[500] == "n00003500"


# --- where they may lie -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("cub200", "CUB_200_2011"),
        ("stanford_cars", "stanford_cars"),
        ("fgvc_aircraft", "fgvc-aircraft-2013b"),
        ("fgvc_aircraft", "fgvc-aircraft-2013b/data"),
    ],
)
def test_the_folder_itself_may_be_given(name, inside, tree):
    root, (train_truth, test_truth) = tree(name)
    info = dataset_info(config(name, root / inside))
    assert (info.num_train, info.num_test) == (len(train_truth), len(test_truth))


@pytest.mark.parametrize(("name", "folder"), [("imagenet100", "imagenet"), ("herbarium19", "herbarium_19")])
def test_below_the_default_root(name, folder, tree, tmp_path, monkeypatch):
    root, (train_truth, _) = tree(name)
    (tmp_path / folder).symlink_to(root)
    monkeypatch.setenv("OPENCON_DATA", str(tmp_path))
    assert dataset_info(DataConfig(name=name)).num_train == len(train_truth)


@pytest.mark.parametrize("name", ["imagenet100", "imagenet1k"])
def test_the_train_folder_of_imagenet(name, tree, tmp_path):
    root, (train_truth, test_truth) = tree(name)
    data = load_dataset(config(name, root / "train", memory_gb=0.0))
    assert_true(data.train, train_truth)
    assert_true(data.held_out(), test_truth)  # val lies beside it
    (tmp_path / "mine").symlink_to(root / "train")
    (tmp_path / "val").symlink_to(root / "val")
    info = dataset_info(config(name, tmp_path / "mine"))
    assert (info.num_train, info.num_test) == (len(train_truth), 0)  # whose val that is, nobody knows


def test_imagenet_as_kaggle_packs_it(tree, tmp_path):
    place = mirror(tree("imagenet100")[0], tmp_path / "ILSVRC/Data/CLS-LOC", depth=0)
    (place / "val").unlink()
    put(place / "val" / "ILSVRC2012_val_00000001.JPEG")  # a heap without classes
    info = dataset_info(config("imagenet100", tmp_path))
    assert (info.num_train, info.num_test) == (200, 0)
    with pytest.raises(DataError, match=r"^imagenet100 has no held-out test images; use eval\.on=unlabeled$"):
        load_dataset(config("imagenet100", tmp_path)).held_out()


def test_cars_in_class_folders(tree):
    root, (train_truth, test_truth) = tree("cars_in_folders")
    data = load_dataset(config("stanford_cars", root))
    assert "Ram C/V Cargo Van Minivan 2012" in data.train.class_names  # whose folder cannot have the slash
    assert_true(data.train, train_truth)
    assert_true(data.held_out(), test_truth)
    alone = load_dataset(config("stanford_cars", root / "train"))
    assert_true(alone.train, train_truth)
    assert alone.test is None


def test_cars_as_copies_nest_them(tmp_path):
    truth = stanford_cars(tmp_path, images="cars_{0}/cars_{0}", test_labels="devkit/cars_test_annos_withlabels.mat")
    data = load_dataset(config("stanford_cars", tmp_path))
    assert_true(data.train, truth[0])
    assert_true(data.held_out(), truth[1])


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("stanford_cars", "stanford_cars/cars_test_annos_withlabels.mat"),
        ("fgvc_aircraft", "fgvc-aircraft-2013b/data/images_variant_test.txt"),
    ],
)
def test_without_test_labels_there_are_no_test_images(name, lost, tree, tmp_path):
    root, (train_truth, _) = tree(name)
    (mirror(root, tmp_path, depth=2) / lost).unlink()
    data = load_dataset(config(name, tmp_path))
    assert (data.info.num_train, data.info.num_test, data.test) == (len(train_truth), 0, None)


def test_herbarium_may_lack_test_images(tree, tmp_path):
    """Of a rare class, or of all of them."""
    root, (_, test_truth) = tree("herbarium19")
    (mirror(root, tmp_path) / "small-validation" / "7").unlink()
    held_out = load_dataset(config("herbarium19", tmp_path, memory_gb=0.0)).held_out()
    assert len(held_out) == len(test_truth) - 1
    assert len(held_out.class_names) == 683
    assert "7" not in {held_out.class_names[c] for c in held_out.classes}
    shutil.rmtree(tmp_path / "small-validation")
    assert dataset_info(config("herbarium19", tmp_path)).num_test == 0


# --- memory and size --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_limit_of_memory_is_kept(name, tree):
    root, _ = tree(name)
    inside, outside = (load_dataset(config(name, root, memory_gb=gb)) for gb in (1.0, 0.0))
    assert isinstance(inside.train.images, torch.Tensor)
    assert isinstance(outside.train.images, StreamedImages)
    for data in (inside, outside):  # never decoded before somebody asks for them
        assert isinstance(data.held_out().images, StreamedImages)
    read = torch.cat([chunk.clone() for chunk in outside.train.images.in_order(64)])
    assert torch.equal(read, inside.train.images)
    assert torch.equal(outside.train.classes, inside.train.classes)


@pytest.mark.parametrize("name", NAMES)
def test_the_size_can_be_chosen(name, tree):
    root, _ = tree(name)
    assert dataset_info(config(name, root, image_size=None)).image_size == 224
    assert dataset_info(config(name, root, image_size=256)).image_size == 256


def test_a_run_reads_training_and_test_images_from_files(tmp_path):
    cub200(tmp_path, num_train=4)
    runs = []
    for memory_gb in (0.0, 1.0):
        given = RunConfig(
            data=config("cub200", tmp_path, image_size=8, memory_gb=memory_gb),
            split=SplitConfig(num_seen=100, labeled_ratio=0.9),
            encoder=EncoderConfig(name="convnet"),
            method=OpenConConfig(),
            train=TrainConfig(epochs=1, batch_size=128),
            eval=EvalConfig(protocol="gcd", on="test"),
        )
        out = tmp_path / f"run{memory_gb}"
        result = train(given, out, torch.device("cpu"))
        assert (result["on"], result["protocol"], result["num_images"]) == ("test", "gcd", 200)
        runs.append({key: value for key, value in result.items() if "seconds" not in key})
    assert runs[0] == runs[1]


# --- what may be wrong ------------------------------------------------------------------------------------------------


def refused(name, root, download=False):
    """The message that looking gives."""
    with pytest.raises(DataError) as caught:
        dataset_info(config(name, root), download=download)
    message = str(caught.value)
    assert "Expected: " in message
    assert "Point data.root (--data) to it. It can be had from https://" in message
    assert message.endswith("--download cannot fetch it.")
    return message


@pytest.mark.parametrize("download", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_there(name, download, tmp_path):
    message = refused(name, tmp_path / "no", download)
    assert message.startswith(f"{name} is not there: looked for ")
    assert f"(there is no folder {tmp_path / 'no'})" in message
    message = refused(name, tmp_path, download)
    assert "there is no folder" not in message
    assert f" {tmp_path}," in message or f" {tmp_path}." in message  # where it looked
    with pytest.raises(DataError, match="is not there: looked for "):
        load_dataset(config(name, tmp_path), download=download)


@pytest.fixture
def cub(tree, tmp_path):
    return mirror(tree("cub200")[0] / "CUB_200_2011", tmp_path / "CUB_200_2011", depth=0)


@pytest.fixture
def aircraft(tree, tmp_path):
    return mirror(tree("fgvc_aircraft")[0] / "fgvc-aircraft-2013b/data", tmp_path / "data", depth=0)


@pytest.fixture
def cars(tree, tmp_path):
    return mirror(tree("stanford_cars")[0] / "stanford_cars", tmp_path / "stanford_cars")


def test_some_of_it_there(cub, tmp_path):
    (cub / "train_test_split.txt").unlink()
    message = refused("cub200", tmp_path)
    assert "looked for images, images.txt, image_class_labels.txt, train_test_split.txt in " in message
    assert f"(train_test_split.txt missing in {cub})" in message


def test_class_folders_missing(tree, tmp_path):
    mirror(tree("imagenet100")[0], tmp_path)
    order = class_order("imagenet100")
    (tmp_path / "train" / order.novel[3]).unlink()
    start = f"{tmp_path}/train has no image of 1 of the 100 classes of imagenet100 ({order.novel[3]})."
    assert refused("imagenet100", tmp_path).startswith(start)
    for wnid in order.seen[:5]:
        (tmp_path / "train" / wnid).unlink()
        put(tmp_path / "train" / wnid / "x.txt")  # no image
    message = refused("imagenet100", tmp_path)
    assert f"no image of 6 of the 100 classes of imagenet100 ({', '.join(order.seen[:3])}, ...)." in message


@pytest.mark.parametrize(
    ("maker", "lost"),
    [
        ("imagenet100", "val/n01558993"),
        ("herbarium19", "small-train/682"),
        ("cars_in_folders", "test/Audi 100 Wagon 1994"),
    ],
)
def test_a_class_without_images(maker, lost, tree, tmp_path):
    (mirror(tree(maker)[0], tmp_path) / lost).unlink()
    folder, name = lost.split("/")
    message = refused(maker.replace("cars_in_folders", "stanford_cars"), tmp_path)
    assert message.startswith(f"{tmp_path / folder} has no image of 1 of the ")
    assert f"({name})" in message


def test_imagenet_with_some_of_its_classes(tree):
    root, _ = tree("imagenet100")
    message = refused("imagenet1k", root)
    assert message.startswith(f"imagenet1k has 1,000 classes, but {root}/train holds 102 of them.")


LABELS = "image_class_labels.txt"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (LABELS, "\n5 2\n", "\n5\n", ", line 5 cannot be understood: expected an image and its value."),
        (LABELS, "\n5 2\n", "\n", "has no line for image 5, which images.txt names."),
        (LABELS, "\n5 2\n", "\n5 201\n", "has the class '201', which is no number from 1 to 200."),
        (LABELS, "\n5 2\n", "\n5 0\n", "has the class '0', which is no number from 1 to 200."),
        (LABELS, "\n5 2\n", "\n5 two\n", "has the class 'two', which is no number from 1 to 200."),
        (LABELS, "\n5 2\n", "\n5 3\n", "gives class 3 to 002.Bird_2/002.Bird_2_1.jpg, against its other lines."),
        (LABELS, " 3\n", " 2\n", "gives class 2 to 003.Bird_3/003.Bird_3_0.jpg, against its other lines."),
        ("train_test_split.txt", "\n5 0\n", "\n", "has no line for image 5, which images.txt names."),
        ("train_test_split.txt", "\n5 0\n", "\n5 no\n", "says 'no' of image 5, which is not 0 or 1."),
        ("images.txt", "_2_1.jpg", "_2_9.jpg", "/images/002.Bird_2/002.Bird_2_9.jpg, which is not there."),
        ("images.txt", "_0.jpg", ".jpg", ".jpg, which is not there (200 of 400 images are missing)."),
    ],
)
def test_text_files_of_cub_that_contradict_each_other(file, old, new, message, cub, tmp_path):
    text = (cub / file).read_text()
    assert old in text
    (cub / file).write_text(text.replace(old, new))
    said = refused("cub200", tmp_path)
    assert said.startswith(str(cub / file))
    assert message in said


def test_a_class_that_no_image_of_cub_has(cub, tmp_path):
    lines = (cub / "images.txt").read_text().splitlines()
    (cub / "images.txt").write_text("\n".join(lines[3:]))  # three images a class
    assert "images.txt has no image of 1 of the 200 classes of cub200 (number 1)." in refused("cub200", tmp_path)


def test_a_text_file_that_is_none(cub, tmp_path):
    path = cub / "images.txt"
    path.write_bytes(b"\xff\xfe\x00")
    assert refused("cub200", tmp_path).startswith(f"{path} cannot be read as text (")
    path.unlink()
    path.mkdir()
    assert refused("cub200", tmp_path).startswith(f"{path} cannot be read as text (")


TRAIN = "images_variant_train.txt"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("variants.txt", "F/A 3\n", "", "names 99 variants, not 100."),
        ("variants.txt", "F/A 3\n", "F/A 4\n", "names 99 variants, not 100."),
        ("images_variant_val.txt", "F/A 3\n", "F-18\n", "has the variant 'F-18', which is not in variants.txt."),
        ("images_variant_test.txt", "F/A 3\n", "F/A 4\n", "no image of 1 of the 100 classes of fgvc_aircraft (F/A 3)."),
        (TRAIN, "00001 ", "9 ", "data/images/9.jpg, which is not there."),
        (TRAIN, "00001 Cessna", "00001", "has the variant '1', which is not in variants.txt."),
        (TRAIN, "00001 Cessna 1", "00001", ", line 2 cannot be understood: expected an image and its value."),
    ],
)
def test_text_files_of_aircraft_that_contradict_each_other(file, old, new, message, aircraft, tmp_path):
    text = (aircraft / file).read_text()
    assert old in text
    (aircraft / file).write_text(text.replace(old, new))
    said = refused("fgvc_aircraft", tmp_path)
    assert said.startswith(str(aircraft / file))
    assert message in said


def test_annotations_of_cars(cars, tmp_path):
    path, files = cars / "devkit/cars_train_annos.mat", [f"{i:05d}.jpg" for i in range(1, 197)]
    write_annotations(path, files, [*range(1, 196), 197])
    start = f"{path} has the class '197', which is no number from 1 to 196."
    assert refused("stanford_cars", tmp_path).startswith(start)
    write_annotations(path, files, [*range(1, 196), 1])
    assert "has no image of 1 of the 196 classes of stanford_cars (smart fortwo" in refused("stanford_cars", tmp_path)
    write_annotations(path, ["x.jpg", *files[1:]], range(1, 197))
    start = f"{path} names {cars / 'cars_train/x.jpg'}, which is not there."
    assert refused("stanford_cars", tmp_path).startswith(start)
    write_annotations(path, files[:1], [2])  # one alone
    assert "has no image of 195 of the 196 classes" in refused("stanford_cars", tmp_path)
    savemat(path, {"other": 3})
    assert refused("stanford_cars", tmp_path).startswith(f"{path} holds no annotations (KeyError")
    path.write_bytes(b"not a mat file")
    assert refused("stanford_cars", tmp_path).startswith(f"{path} holds no annotations (")
