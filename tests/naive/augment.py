"""Views, one image and often one pixel at a time: what `opencon.data.augment` does to a whole batch at once.

An image is a float tensor (channels, height, width) in [0, 1], unless it is said to be uint8.
"""

import colorsys
import math

import torch
import torch.nn.functional as F


def crop_box(shares, ratios, place, source_size, allowed):
    """The first (share, ratio) whose box fits, at `place`; else the largest centered box of an allowed ratio."""
    height, width = source_size
    for share, ratio in zip(shares, ratios, strict=True):
        w = round(math.sqrt(height * width * share * ratio))
        h = round(math.sqrt(height * width * share / ratio))
        if 0 < w <= width and 0 < h <= height:
            return [math.floor(place[0] * (height - h + 1)), math.floor(place[1] * (width - w + 1)), h, w]
    h, w = height, width
    if width / height < allowed[0]:
        h = round(width / allowed[0])
    elif width / height > allowed[1]:
        w = round(height * allowed[1])
    return [(height - h) // 2, (width - w) // 2, h, w]


def resized_crop(image, box, size):
    """`image` is uint8."""
    top, left, height, width = box
    crop = image[None, :, top : top + height, left : left + width].float() / 255
    return F.interpolate(crop, (size, size), mode="bilinear", antialias=True, align_corners=False)[0]


def flip(image):
    out = image.clone()
    for j in range(image.shape[2]):
        out[:, :, j] = image[:, :, image.shape[2] - 1 - j]
    return out


def warp(image, angle, shift, zoom):
    """Where does the pixel that is seen at (i, j) come from? Undo the shift, the rotation and the zoom, in turn."""
    size = image.shape[1]
    out = torch.zeros_like(image)
    for i in range(size):
        for j in range(size):
            right = j + 0.5 - size / 2 - shift[0] * size
            up = -(i + 0.5 - size / 2 - shift[1] * size)
            back = complex(right, up) * complex(math.cos(-angle), math.sin(-angle)) / zoom
            x, y = back.real + size / 2 - 0.5, -back.imag + size / 2 - 0.5
            for k in (math.floor(y), math.floor(y) + 1):
                for m in (math.floor(x), math.floor(x) + 1):
                    if 0 <= k < size and 0 <= m < size:
                        out[:, i, j] += (1 - abs(y - k)) * (1 - abs(x - m)) * image[:, k, m]
    return out


def gray(image):
    if len(image) == 1:
        return image
    one = 0.2989 * image[0] + 0.587 * image[1] + 0.114 * image[2]
    return torch.stack([one, one, one])


def brightness(image, factor):
    return (factor * image).clamp(0, 1)


def contrast(image, factor):
    return (factor * image + (1 - factor) * gray(image).mean()).clamp(0, 1)


def saturation(image, factor):
    return (factor * image + (1 - factor) * gray(image)).clamp(0, 1)


def hue(image, shift):
    out = torch.empty_like(image)
    for i in range(image.shape[1]):
        for j in range(image.shape[2]):
            h, s, v = colorsys.rgb_to_hsv(*image[:, i, j].tolist())
            out[:, i, j] = torch.tensor(colorsys.hsv_to_rgb((h + shift) % 1.0, s, v))
    return out


JITTER = (brightness, contrast, saturation, hue)


def blur(image, sigma):
    """A square of weights around each pixel; outside the image its mirror, the edge pixel not doubled."""
    size = image.shape[1]
    radius = max(3, size // 10) // 2

    def inside(k):
        return -k if k < 0 else 2 * (size - 1) - k if k >= size else k

    reach = range(-radius, radius + 1)
    weight = {(a, b): math.exp(-(a * a + b * b) / (2 * sigma * sigma)) for a in reach for b in reach}
    total = sum(weight.values())

    def blurred(rows, i, j):
        return sum(w * rows[inside(i + a)][inside(j + b)] for (a, b), w in weight.items()) / total

    side = range(size)
    return torch.tensor([[[blurred(rows, i, j) for j in side] for i in side] for rows in image.tolist()])


def view(image, params, operations, size, magnitude=9.0):
    """One uint8 image through everything, in order. `params` holds this image's values, None for what is off."""
    whole = [0, 0, *image.shape[1:]]
    x = resized_crop(image, whole if params.box is None else params.box.tolist(), size)
    if params.is_flipped is not None and params.is_flipped:
        x = flip(x)
    if params.angle is not None:
        x = warp(x, params.angle.item(), params.shift.tolist(), params.zoom.item())
    if params.is_jittered is not None and params.is_jittered:
        for turn in range(len(operations)):
            column = params.turns.tolist().index(turn)
            x = JITTER[operations[column]](x, params.factors[column].item())
    if params.is_gray is not None and params.is_gray:
        x = gray(x)
    if params.is_blurred is not None and params.is_blurred:
        x = blur(x, params.sigma.item())
    if params.rand_operations is not None:
        for number, sign in zip(params.rand_operations.tolist(), params.rand_signs.tolist(), strict=True):
            x = rand_operation(x, number, sign, magnitude)
    return x


# --- RandAugment ------------------------------------------------------------------------------------------------------


def moved(image, source):
    """The image whose pixel at offset (u, v) from the center, right and down, shows that at source(u, v)."""
    size = image.shape[1]
    out = torch.zeros_like(image)
    for i in range(size):
        for j in range(size):
            u, v = source(j + 0.5 - size / 2, i + 0.5 - size / 2)
            x, y = u + size / 2 - 0.5, v + size / 2 - 0.5
            for k in (math.floor(y), math.floor(y) + 1):
                for m in (math.floor(x), math.floor(x) + 1):
                    if 0 <= k < size and 0 <= m < size:
                        out[:, i, j] += (1 - abs(y - k)) * (1 - abs(x - m)) * image[:, k, m]
    return out


def sharpness(image, factor):
    size, smooth = image.shape[1], image.clone()
    for i in range(1, size - 1):
        for j in range(1, size - 1):
            total = 5 * image[:, i, j]
            for a in (-1, 0, 1):
                for b in (-1, 0, 1):
                    if (a, b) != (0, 0):
                        total = total + image[:, i + a, j + b]
            smooth[:, i, j] = total / 13
    return (factor * image + (1 - factor) * smooth).clamp(0, 1)


def levels(image):
    return [[round(value * 255) for row in channel for value in row] for channel in image.tolist()]


def of_levels(channels, like):
    return torch.tensor(channels, dtype=torch.float32).view_as(like) / 255


def posterize(image, bits):
    return of_levels([[value & ~(2 ** (8 - bits) - 1) for value in channel] for channel in levels(image)], image)


def solarize(image, threshold):
    return torch.where(image >= threshold, 1 - image, image)


def auto_contrast(image):
    channels = []
    for channel in image:
        low, high = channel.min(), channel.max()
        channels.append((channel - low) / (high - low) if high > low else channel)
    return torch.stack(channels)


def equalize(image):
    channels = []
    for original, values in zip(image, levels(image), strict=True):
        histogram = [values.count(level) for level in range(256)]
        step = (len(values) - histogram[max(values)]) // 255
        if step == 0:
            channels.append(original)
            continue
        table, total = [], step // 2
        for count in histogram:
            table.append(min(255, total // step))
            total += count
        channels.append(of_levels([table[value] for value in values], original))
    return torch.stack(channels)


def rand_operation(image, number, sign, magnitude):
    """One operation of RandAugment, by its place in the paper's list as torchvision orders it."""
    part, size = magnitude / 30, image.shape[1]
    amount, factor = sign * part, 1 + sign * 0.9 * part
    angle = math.radians(30 * amount)
    return (
        lambda: image,
        lambda: moved(image, lambda u, v: (u + 0.3 * amount * v, v)),
        lambda: moved(image, lambda u, v: (u, v + 0.3 * amount * u)),
        lambda: moved(image, lambda u, v: (u - 150 / 331 * size * amount, v)),
        lambda: moved(image, lambda u, v: (u, v - 150 / 331 * size * amount)),
        lambda: warp(image, angle, [0, 0], 1),
        lambda: brightness(image, factor),
        lambda: saturation(image, factor),
        lambda: contrast(image, factor),
        lambda: sharpness(image, factor),
        lambda: posterize(image, 8 - round(4 * part)),
        lambda: solarize(image, 1 - part),
        lambda: auto_contrast(image),
        lambda: equalize(image),
    )[number]()


# --- two images in one ------------------------------------------------------------------------------------------------


def mixup(image, other, share):
    return share * image + (1 - share) * other


def cutmix(image, other, box):
    """Inside the box (top, left, bottom, right) the other image."""
    out = image.clone()
    for i in range(box[0], box[2]):
        for j in range(box[1], box[3]):
            out[:, i, j] = other[:, i, j]
    return out
