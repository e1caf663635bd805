"""A reader of format 1 in plain Python, written from docs/format.md alone: nothing of Midstride is used.

python tests/plain_reader.py RUN            prints the latest checkpoint's arrays
"""

import base64
import json
import math
import os
import re
import sys

import xxhash  # the published XXH3-128; any implementation will do

BLOCK = 16 * 2**20


def latest(run):
    """The folder and the manifest of the checkpoint with the highest ``seq``."""
    found = []
    for name in os.listdir(run):
        path = os.path.join(run, name, "manifest.json")
        if re.fullmatch(r"step-[0-9]+-[0-9a-f]{8}", name) and os.path.exists(path):
            raw = open(path, "rb").read()
            claimed, zeroed = raw[-35:-3], raw[:-35] + b"0" * 32 + raw[-3:]
            if xxhash.xxh3_128_hexdigest(zeroed).encode() == claimed:
                found.append((json.loads(raw)["seq"], os.path.join(run, name), json.loads(raw)))
    return max(found)[1:]


def array(folder, manifest, number):
    """One array as (dtype, shape, bytes), every byte checked."""
    record = manifest["arrays"][number]
    (part,) = record["slices"]
    begin, end = part["bytes"]
    with open(os.path.join(folder, manifest["files"][part["file"]]["name"]), "rb") as file:
        file.seek(begin)
        data = file.read(end - begin)
    blocks = [xxhash.xxh3_128_hexdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    joined = xxhash.xxh3_128_hexdigest(b"".join(map(bytes.fromhex, blocks)))
    digest = joined if len(blocks) > 1 else xxhash.xxh3_128_hexdigest(data)
    if digest != part["digest"]:
        raise ValueError(f"{part['key']} is damaged")
    return record["dtype"], tuple(record["shape"]), data


def value(node, arrays):
    """A place of the tree: containers in their plain forms, arrays through ``arrays(number)``."""
    if isinstance(node, list):
        return [value(item, arrays) for item in node]
    if not isinstance(node, dict):
        return node
    kind, v = node["$"], node.get("v")
    if kind == "array":
        return arrays(node["i"])
    if kind in ("int", "float"):
        return int(v, 16) if kind == "int" else float(v)
    if kind in ("bytes", "numpy"):
        return base64.b64decode(v) if kind == "bytes" else (node["dtype"], bytes.fromhex(v))
    if kind == "str":
        return base64.b64decode(v).decode("utf-16-le", "surrogatepass")
    if kind in ("complex", "enum", "path"):
        return complex(*(value(x, arrays) for x in v)) if kind == "complex" else value(v, arrays)
    if kind == "object":
        return value(node["items"][0], arrays)
    if "items" in node:
        return tuple(value(item, arrays) for item in node["items"])
    if "named" in node:
        return {key: value(item, arrays) for key, item in node["named"].items()}
    return {value(key, arrays): value(item, arrays) for key, item in node["pairs"]}


def load(run):
    folder, manifest = latest(run)
    return value(manifest["tree"], lambda number: array(folder, manifest, number))


if __name__ == "__main__":
    folder, manifest = latest(sys.argv[1])
    for number, record in enumerate(manifest["arrays"]):
        print(record["dtype"], record["shape"], math.prod(record["shape"]), record["slices"][0]["key"])
