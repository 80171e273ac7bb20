"""Convolution, norms and attention, one number at a time or one head at a time."""

import math

import torch


def conv2d(x, weight, stride, padding):
    """Cross-correlation without bias, one output pixel at a time."""
    batch, _, height, width = x.shape
    kernel = weight.shape[-1]
    padded = torch.zeros(batch, x.shape[1], height + 2 * padding, width + 2 * padding, dtype=x.dtype)
    padded[:, :, padding : padding + height, padding : padding + width] = x
    rows = (height + 2 * padding - kernel) // stride + 1
    columns = (width + 2 * padding - kernel) // stride + 1
    out = torch.zeros(batch, len(weight), rows, columns, dtype=x.dtype)
    for i in range(rows):
        for j in range(columns):
            patch = padded[:, :, i * stride : i * stride + kernel, j * stride : j * stride + kernel]
            for o in range(len(weight)):
                out[:, o, i, j] = (patch * weight[o]).sum(dim=(1, 2, 3))
    return out


def batch_norm(x, bn, training):
    """Per channel: (x - mean) / sqrt(variance + eps) * weight + bias, biased variance of the batch when training."""
    out = torch.empty_like(x)
    for c in range(x.shape[1]):
        mean = x[:, c].mean() if training else bn.running_mean[c]
        variance = ((x[:, c] - mean) ** 2).mean() if training else bn.running_var[c]
        out[:, c] = (x[:, c] - mean) / torch.sqrt(variance + bn.eps) * bn.weight[c] + bn.bias[c]
    return out


def relu(x):
    return torch.where(x > 0, x, torch.zeros_like(x))


def shortcut(x, block, stride, training):
    if block.downsample is None:
        return x
    conv, bn = block.downsample
    return batch_norm(conv2d(x, conv.weight, stride, 0), bn, training)


def basic_block(x, block, stride, training):
    out = relu(batch_norm(conv2d(x, block.conv1.weight, stride, 1), block.bn1, training))
    out = batch_norm(conv2d(out, block.conv2.weight, 1, 1), block.bn2, training)
    return relu(out + shortcut(x, block, stride, training))


def bottleneck(x, block, stride, training):
    """The stride stands on the 3x3 convolution ("v1.5")."""
    out = relu(batch_norm(conv2d(x, block.conv1.weight, 1, 0), block.bn1, training))
    out = relu(batch_norm(conv2d(out, block.conv2.weight, stride, 1), block.bn2, training))
    out = batch_norm(conv2d(out, block.conv3.weight, 1, 0), block.bn3, training)
    return relu(out + shortcut(x, block, stride, training))


def layer_norm(x, norm, eps):
    mean = x.mean(dim=-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * norm.weight + norm.bias


def attention(x, attn, num_heads):
    """One image, one head and one query at a time; rows of the qkv weight are all q, then all k, then all v."""
    batch, tokens, width = x.shape
    size = width // num_heads
    out = torch.zeros_like(x)
    for b in range(batch):
        q, k, v = (
            x[b] @ attn.qkv.weight[part * width : (part + 1) * width].T
            + attn.qkv.bias[part * width : (part + 1) * width]
            for part in range(3)
        )
        for h in range(num_heads):
            of_head = slice(h * size, (h + 1) * size)
            for t in range(tokens):
                scores = [float(q[t, of_head] @ k[s, of_head]) / math.sqrt(size) for s in range(tokens)]
                p = [math.exp(s - max(scores)) for s in scores]
                for s in range(tokens):
                    out[b, t, of_head] += p[s] / sum(p) * v[s, of_head]
    return out @ attn.proj.weight.T + attn.proj.bias


def gelu(x):
    """x times the standard normal distribution function at x."""
    return torch.tensor(
        [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.flatten().tolist()], dtype=x.dtype
    ).view_as(x)


def vit(images, net, patch, num_heads, eps):
    """Class token after the final norm, for images of the size the network was built for."""
    batch, _, height, width = images.shape
    embed = net.embed
    rows = []
    for b in range(batch):
        tokens = [embed.cls_token[0, 0]]
        for i in range(height // patch):
            for j in range(width // patch):
                piece = images[b, :, i * patch : (i + 1) * patch, j * patch : (j + 1) * patch]
                tokens.append((embed.proj.weight * piece).sum(dim=(1, 2, 3)) + embed.proj.bias)
        rows.append(torch.stack(tokens) + embed.pos_embed[0])
    x = torch.stack(rows)
    for name in net.stages[1:-1]:
        block = getattr(net, name)
        x = x + attention(layer_norm(x, block.norm1, eps), block.attn, num_heads)
        mlp = block.mlp
        hidden = gelu(layer_norm(x, block.norm2, eps) @ mlp.fc1.weight.T + mlp.fc1.bias)
        x = x + hidden @ mlp.fc2.weight.T + mlp.fc2.bias
    return layer_norm(x, net.norm, eps)[:, 0]
