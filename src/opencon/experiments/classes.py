"""What a trained run knows of classes, in a form that judges one image at a time: for new images, and to take elsewhere.

A method may judge rows by an output for each class (`Method.row_logits`); then a new image goes where the method itself
would put it. If it knows only the seen classes, images that it is unsure of go to the nearest mean of the new groups. If it
only groups whole sets, a new image goes to the nearest mean of the groups that its training images fell into, which is the
very rule of k-means.

    classes.json         names, sizes, examples, and how the images reach the method
    classes.safetensors  means, order of the outputs, thresholds, rows of the examples

Letters: M images, D embedding size, S seen classes, C classes and groups together.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opencon.cluster.numbering import order_by_size
from opencon.experiments.workbench import Workbench
from opencon.methods import Assignment, FeatureBank, Method, Task
from opencon.metrics import match
from opencon.openworld.model import OpenWorldModel
from opencon.openworld.strangers import Strangers
from opencon.training.run_folder import RunFolder

FILE, TENSORS = "classes.json", "classes.safetensors"
MOST_EXAMPLES = 20  # of a class, ours, as in a discovery
SCALES = torch.logspace(-1, 3, 21)  # of squared distances in units of their mean, to choose the best of; ours
ROWS = 8192  # judged at a time
SMALLEST = 1e-12  # probability, so that its logarithm is finite

Rule = Literal["outputs", "seen", "means"]  # an output for each class; outputs of the seen ones; the nearest mean


class RunClasses(OpenWorldModel):
    """Rows that a run's method embeds, to its classes and groups, the new groups numbered by size."""

    means: Tensor  # (C, D) of the training rows of each class
    outputs: Tensor  # (C,) which output of the method each class is
    unsure: Tensor  # scalar: with the rule "seen", an image below this confidence belongs to a new group
    scale: Tensor  # scalar: logits are minus this times the squared distance to a mean
    is_empty: Tensor  # (C,) bool: no training image fell into it

    def __init__(
        self, method: Method[Any], *, rule: Rule, dim: int, num_seen: int, num_classes: int, num_references: int = 1
    ) -> None:
        nn.Module.__init__(self)  # the encoder and head of a fit have no place here
        self.method, self.rule = method, rule
        self.num_features, self.dim, self.num_seen, self.num_classes = dim, dim, num_seen, num_classes
        self.register_buffer("prototypes", torch.zeros(num_classes, dim))
        self.register_buffer("means", torch.zeros(num_classes, dim))
        self.register_buffer("outputs", torch.arange(num_classes))
        self.register_buffer("unsure", torch.tensor(0.0))
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("is_empty", torch.zeros(num_classes, dtype=torch.bool))
        self.register_buffer("sharpness", torch.tensor(1.0))
        self.strangers = Strangers(dim, num_references)

    def settings(self) -> dict[str, Any]:
        """Plain data, beside the method, from which the same can be built."""
        plain = {name: getattr(self, name) for name in ("rule", "dim", "num_seen", "num_classes")}
        return plain | {"num_references": len(self.strangers.rows)}

    def own_tensors(self) -> dict[str, Tensor]:
        """All that is not the method's."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("method.")}

    def embed(self, x: Tensor) -> Tensor:
        """Rows are what the method embeds already."""
        return x

    def learned(self, x: Tensor) -> Tensor:
        """The same."""
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(M, D) -> p (M, C), confidence (M,), novelty (M,), the log odds of new against seen, and oddness (M,)."""
        p, (oddness, _) = self.probabilities(x), self.strangers(x)
        seen, new = p[:, : self.num_seen].sum(dim=1), p[:, self.num_seen :].sum(dim=1)
        novelty = new.clamp(min=SMALLEST).log() - seen.clamp(min=SMALLEST).log()
        return p, p.amax(dim=1), novelty, oddness

    def probabilities(self, z: Tensor) -> Tensor:
        """(M, D) -> (M, C), by the rule."""
        if self.rule == "means":
            return self._near(z).softmax(dim=1)
        logits = self.method.row_logits(z)
        assert logits is not None
        if self.rule == "outputs":
            return logits.softmax(dim=1)[:, self.outputs]
        seen = logits.softmax(dim=1)  # (M, S)
        is_new = seen.amax(dim=1, keepdim=True) < self.unsure
        new = self._near(z)[:, self.num_seen :].softmax(dim=1)
        return torch.cat([seen * ~is_new, new * is_new], dim=1)

    def _near(self, z: Tensor) -> Tensor:
        """(M, D) -> (M, C) logits: the nearer the mean, the larger."""
        z = z if self.rule == "means" else F.normalize(z, dim=1)
        squared = z.square().sum(dim=1, keepdim=True) - 2.0 * z @ self.means.T + self.means.square().sum(dim=1)
        return (-self.scale * squared.clamp(min=0)).masked_fill(self.is_empty, -1e9)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run's classes besides tensors: plain data."""

    class_names: tuple[str, ...]  # C: the seen classes, then new-1, new-2, ...
    sizes: tuple[int, ...]  # C: training images that carried the label or fell to the group
    order: tuple[int, ...]  # C: the number that the method gives to each of them
    example_files: tuple[tuple[str, ...], ...]
    agrees: float  # share of the unlabeled training images that get the class the run gave them
    settings: dict[str, Any]  # of `RunClasses`
    task: dict[str, Any]  # what the method was told
    channels: int
    stored_size: int  # side at which images are decoded
    view_size: int  # side at which the network sees them
    first_names: tuple[str, ...] = ()  # C: the names before any renaming; empty: `class_names`


def learned_classes(bench: Workbench, bank: FeatureBank, assignment: Assignment) -> tuple[Facts, RunClasses, Tensor]:
    """The classes of a trained run, from what it says of its training images; and the rows (E, D) of the examples."""
    num_seen, num_classes = bench.split.num_seen, bench.split.num_classes
    num_images = len(bench.labels)
    z, labels = bank.z[:num_images].detach().cpu().float(), bench.labels.cpu()
    found = assignment.classes[:num_images].cpu()
    if not bench.config.method.uses_labels:  # nothing is seen, and nothing was assigned so far
        num_seen, found = 0, bench.method.assign(FeatureBank(bank.z[:num_images], bench.labels)).classes.cpu()
    order = order_by_size(found[labels < 0], num_seen, num_classes)
    place = torch.empty_like(order)
    place[order] = torch.arange(num_classes)
    classes = torch.where(labels >= 0, labels, place[found])  # (M,)
    head = _fitted(bench.method, z, labels, classes, place[found], order, num_seen)
    own, judged = _judged(head, z, classes, bench.device)
    members = [(classes == c).nonzero()[:, 0] for c in range(num_classes)]
    best = [rows[own[rows].argsort(descending=True, stable=True)][:MOST_EXAMPLES] for rows in members]
    files = file_names(bench.dataset.train.files, bench.config.data.name, num_images)
    free = labels < 0
    facts = Facts(
        class_names=_in_order(bench.dataset.train.class_names[:num_seen], num_classes),
        sizes=tuple(map(len, members)),
        order=tuple(order.tolist()),
        example_files=tuple(tuple(files[i] for i in rows.tolist()) for rows in best),
        agrees=float((judged == place[found])[free].float().mean()),
        settings=head.settings(),
        task=asdict(bench.method.task),
        channels=int(bench.images.shape[1]),
        stored_size=int(bench.images.shape[-1]),
        view_size=bench.size,
    )
    return facts, head, F.normalize(z[torch.cat(best)], dim=1)


@torch.no_grad()
def _judged(head: RunClasses, z: Tensor, classes: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """How likely the class of each row is, and the likeliest class; part by part, because (M, C) can be large."""
    own, likeliest = [], []
    for rows, its in zip(torch.split(z, ROWS), torch.split(classes, ROWS), strict=True):
        p = head.probabilities(rows.to(device)).cpu()
        own.append(p.gather(1, its[:, None])[:, 0])
        likeliest.append(p.argmax(dim=1))
    return torch.cat(own), torch.cat(likeliest)


def write_classes(folder: RunFolder, bench: Workbench, bank: FeatureBank, assignment: Assignment) -> None:
    """Keep the classes beside a run, so that it can be used without its data. Call it within `bench.judged_weights()`."""
    facts, head, examples = learned_classes(bench, bank, assignment)
    tensors = {**head.own_tensors(), "examples": examples}
    if bench.method.twin is not None:  # a checkpoint holds the weights that learn, not those that are judged
        tensors |= {f"method.{name}": tensor.clone() for name, tensor in judged_state(bench.method).items()}
    folder.save_tensors(TENSORS, tensors, {"method": bench.config.method.name})
    folder.write_json(FILE, asdict(facts))


def judged_state(method: Method[Any]) -> dict[str, Tensor]:
    """The weights that a method has now, without their average."""
    return {name: tensor for name, tensor in method.state_dict().items() if not name.startswith("twin.")}


def facts_from(plain: dict[str, Any]) -> Facts:
    """From plain data, as JSON gives it back."""
    lists: dict[str, Any] = {name: tuple(map(str, plain[name])) for name in ("class_names", "first_names")}
    lists |= {name: tuple(map(int, plain[name])) for name in ("sizes", "order")}
    files = tuple(tuple(map(str, names)) for names in plain["example_files"])
    return Facts(**{**plain, **lists, "example_files": files})


def task_of(facts: Facts) -> Task:
    """What the method was told."""
    return Task(**facts.task)


def _fitted(
    method: Method[Any], z: Tensor, labels: Tensor, classes: Tensor, found: Tensor, order: Tensor, num_seen: int
) -> RunClasses:
    """The rule of the method, and the numbers it needs.

    Args:
        method: of the run.
        z: (M, D) its rows.
        labels: (M,) -1 where there is none.
        classes: (M,) labels, and what the run found where there is none; new groups by size.
        found: (M,) what the run found for all.
        order: (C,) the number that the method gives to each class.
        num_seen: S.
    """
    num_classes, dim = len(order), z.shape[1]
    device = next(method.buffers(), next(method.parameters())).device
    rule, largest, confidence = _outputs(method, z, device, num_classes) if num_seen else ("means", found, None)
    head = RunClasses(method, rule=rule, dim=dim, num_seen=num_seen, num_classes=num_classes)
    rows = z if rule == "means" else F.normalize(z, dim=1)
    classes = found if rule == "means" else classes  # its groups are its own, wherever the labeled images fell
    count = torch.bincount(classes, minlength=num_classes)
    head.means.copy_(torch.zeros(num_classes, dim).index_add_(0, classes, rows) / count.clamp(min=1)[:, None])
    head.prototypes.copy_(F.normalize(head.means, dim=1))
    head.is_empty.copy_(count == 0)
    if rule == "outputs":
        named = match(largest.numpy(), found.numpy())  # a method may name its outputs by labeled images
        output = {c: k for k, c in named.items()}
        left = [k for k in order.tolist() if k not in named]
        head.outputs.copy_(torch.tensor([output[c] if c in output else left.pop(0) for c in range(num_classes)]))
    elif confidence is not None:
        head.unsure.copy_(_best_cut(confidence[labels < 0], found[labels < 0] >= num_seen))
    if rule != "outputs":
        head.scale.copy_(_best_scale(rows, head.means, labels))
        head.sharpness.copy_(4 * head.scale)  # how fast logits can change: unit rows are at most 2 from a mean
    head.strangers = Strangers.fit(z, classes, num_classes)[0].to(device)  # who is unlike everything, as in a discovery
    for name, tensor in head.named_buffers(
        recurse=False
    ):  # the method is where it is; moving it would unfold its encoder
        setattr(head, name, tensor.to(device))
    return head


@torch.no_grad()
def _outputs(
    method: Method[Any], z: Tensor, device: torch.device, num_classes: int
) -> tuple[Rule, Tensor, Tensor | None]:
    """The rule of a method; of each row the largest output, and how sure it is, where only seen classes have one."""
    largest, confidence = [], []
    for rows in torch.split(z, ROWS):
        logits = method.row_logits(rows.to(device))
        if logits is None:
            return "means", torch.empty(0, dtype=torch.int64), None
        knows_all = logits.shape[1] == num_classes
        largest.append(logits.argmax(dim=1).cpu())
        confidence.append(logits.softmax(dim=1).amax(dim=1).cpu())
    return ("outputs" if knows_all else "seen"), torch.cat(largest), None if knows_all else torch.cat(confidence)


def _best_cut(confidence: Tensor, is_new: Tensor) -> Tensor:
    """The confidence below which images are new, such that as many as possible are where the run put them."""
    order = confidence.argsort()
    new_below = torch.cat([torch.zeros(1), is_new[order].float().cumsum(0)])
    seen_below = torch.arange(len(new_below)) - new_below
    cut = int((new_below - seen_below).argmax())
    edges = torch.cat([torch.zeros(1), confidence[order], torch.tensor([1.1])])
    return (edges[cut] + edges[cut + 1]) / 2


def _best_scale(rows: Tensor, means: Tensor, labels: Tensor) -> Tensor:
    """The scale of squared distances under which the labels are likeliest; without labels, one over their mean."""
    every = max(1, len(rows) // ROWS)  # some thousand rows suffice for one number
    rows, labels = rows[::every], labels[::every]
    squared = torch.cdist(rows, means).square()  # (some rows, C)
    mean = squared.amin(dim=1).mean().clamp(min=SMALLEST)
    is_labeled = labels >= 0
    if not bool(is_labeled.any()):
        return 1 / mean
    losses = [F.cross_entropy(-scale / mean * squared[is_labeled], labels[is_labeled]) for scale in SCALES]
    return SCALES[int(torch.stack(losses).argmin())] / mean


def class_names(bench: Workbench, found: Tensor) -> tuple[str, ...]:
    """(C) names by the method's own numbers, given the class (M,) it found for each training image."""
    num_seen = bench.split.num_seen if bench.config.method.uses_labels else 0
    num_classes = bench.split.num_classes
    order = order_by_size(found[bench.labels.cpu() < 0], num_seen, num_classes).tolist()
    names = _in_order(bench.dataset.train.class_names[:num_seen], num_classes)
    of = dict(zip(order, names, strict=True))
    return tuple(of[c] for c in range(num_classes))


def file_names(files: Sequence[str], data: str, num_images: int) -> list[str]:
    """A name for each image: its path below the folder of all of them, or its number."""
    if not files:
        return [f"{data} {i}" for i in range(num_images)]
    whole = [Path(os.path.abspath(file)) for file in files]
    root = os.path.commonpath([str(path.parent) for path in whole])
    return [path.relative_to(root).as_posix() for path in whole]


def _in_order(seen: tuple[str, ...], num_classes: int) -> tuple[str, ...]:
    """The seen names, then new-1, new-2, ... without those that are taken."""
    new = (name for i in itertools.count(1) if (name := f"new-{i}") not in seen)
    return (*seen, *itertools.islice(new, num_classes - len(seen)))
