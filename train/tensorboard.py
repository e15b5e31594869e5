"""TensorBoard in the colours of the figures: a learner's own, wherever it plays.

TensorBoard has no setting for this: its page counts runs and takes the next of its own seven colours. Its server takes the files of
its page from whoever starts it, so we hand it the same files with a preamble and three expressions changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import socket
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

from torchcmdp.errors import InvalidInput
from torchcmdp.learners import LEARNERS
from torchcmdp.plotting.style import COLOURS

from .program import IN_A_CLONE, Bound, parse, spoken

Provider = Callable[[], IO[bytes]]
Port = Annotated[int, Bound(lambda value: 0 <= value < 2**16, "it must be a port, from 0 to 65535")]


@dataclass
class Options:
    """Look at runs in a browser: TensorBoard, in which a learner has the colour that it has in every figure.

    Open the address that it prints; Ctrl-C stops it. A run is coloured by the name of its folder, such as main/wc-ops: a learner
    that plays more than once in an experiment has shades of its colour, and runs that are called after no learner have colours of
    TensorBoard's own. Colours that you choose in the page, by hand or by grouping runs, come before ours. All else is as in
    `tensorboard --logdir runs`, which has more options, and other colours.

    Examples:
      python -m train tensorboard
      python -m train tensorboard --logdir runs/paper --port 6007
      python -m train tensorboard --host 0.0.0.0
    """

    logdir: str = "runs"  # Folder of the runs, or of experiments that hold them, however deep.
    port: Port | None = None  # Where it listens: without it from 6006 on the first that is free, for 0 any that is free.
    host: str = "localhost"  # Who may look: this machine alone, or 0.0.0.0 for all that reach it.


# The names that we put into the page for what it asks: the colour of a run, and the colours of runs that somebody has chosen.
PREAMBLE = """(() => {
  const colours = %s, shades = [0, 0.4, -0.4, 0.65], seen = {};
  const mixed = (colour, share) => "#" + [1, 3, 5].map((j) => {
    const part = parseInt(colour.slice(j, j + 2), 16);
    return Math.round(share < 0 ? part * (1 + share) : part + (255 - part) * share).toString(16).padStart(2, "0");
  }).join("");
  const colour = window.torchcmdpColour = (run) => {
    const [, experiment, folder] = run.match(/^(.*?)([^/]*)$/), name = folder.toLowerCase().replace(/[^a-z0-9]+/g, "-");
    const found = Object.keys(colours).find((learner) => (name + "-").startsWith(learner + "-"));
    if (!found) return undefined;
    const variants = seen[experiment + colours[found]] ||= [];
    if (!variants.includes(run)) variants.push(run);
    const share = shades[variants.indexOf(run) %% shades.length], dark = document.body.classList.contains("dark-mode");
    return mixed(dark && colours[found] === "#000000" ? "#ffffff" : colours[found], share);
  };
  const grouped = (new URLSearchParams(location.search).get("runColorGroup") || "run") !== "run";
  const ours = (run) => grouped ? undefined : colour(run);
  window.TorchcmdpChosen = class extends Map {
    has(run) { return super.has(run) || ours(run) !== undefined; }
    get(run) { return super.has(run) ? super.get(run) : ours(run); }
  };
})();
"""
# By what we look for, what stands there instead. Names of properties are whole in the page, those of variables are not; each of
# these is there once, from TensorBoard 2.16 to 2.21. The first two are about the tab Time Series, the third about the others.
CHANGES = {
    r"(runColorOverrideForGroupBy:new) Map(?=(?:\(\))?,defaultRunColorIdForGroupBy)": r"\1 TorchcmdpChosen",
    r"new Map(?=\([\w$]+\.runColorOverrideForGroupBy\))": "new TorchcmdpChosen",
    r"(this\.identifiers\.set\(([\w$]+),)(?=this\.palette\[)": r"\1torchcmdpColour(\2)||",
}
SCRIPT, PAGE = "index.js", "index.html"


def main(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    options = parse(Options, arguments, prog=f"{IN_A_CLONE} tensorboard")
    place = Path(options.logdir).expanduser()
    if place.is_file():
        raise InvalidInput(f"--logdir {options.logdir} is a file; expected a folder of runs.")
    try:
        socket.getaddrinfo(options.host, None)
    except OSError as error:
        raise InvalidInput(f"--host {options.host} is no name or address that this machine knows.") from error
    if not place.exists() and "://" not in options.logdir:
        print(f"There is no folder {options.logdir} yet; the page fills when `{spoken(IN_A_CLONE)}` writes to it.", file=sys.stderr)
    from tensorboard import program  # slow to import

    board = program.TensorBoard(assets_zip_provider=page())
    board.configure(logdir=options.logdir or ".", port=options.port, host=options.host)
    return 2 if board.main() else 0  # it has said why


def page() -> Provider | None:
    """The files of TensorBoard's page with our colours; None, for its own, and a sentence where it is not as we know it."""
    from tensorboard import version

    try:
        from tensorboard.assets import get_default_assets_zip_provider

        return coloured(get_default_assets_zip_provider(), colours())
    except Exception as error:  # whatever it is about another version, its page without our colours is better than none
        why = f"has a page that torchcmdp does not know ({type(error).__name__}: {' '.join(str(error).split())})"
        print(f"Runs have colours of TensorBoard's own, since its version {version.VERSION} {why}.", file=sys.stderr)
        return None


def colours() -> dict[str, str]:
    """By what folders are called after, the colours of learners; of names that begin alike the longer one first."""
    names = {re.sub(r"[^a-z0-9]+", "-", name.lower()): colour for name, colour in COLOURS.items()}
    names |= {key: COLOURS[kind.name] for key, kind in LEARNERS.items() if kind.name in COLOURS}
    return dict(sorted(names.items(), key=lambda item: -len(item[0])))


def coloured(provider: Provider, colours: Mapping[str, str]) -> Provider:
    """The files of TensorBoard's page, changed so that it colours runs by these names; `LookupError` where that cannot be."""
    with provider() as file, zipfile.ZipFile(file) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    script = files[SCRIPT].decode()
    for pattern, replacement in CHANGES.items():
        script, found = re.subn(pattern, replacement, script)
        if found != 1:
            raise LookupError(f"its script has {pattern} {found} times and not once")
    script = PREAMBLE % json.dumps(colours) + script
    files[SCRIPT] = script.encode()
    # browsers keep the script for a day by this hash, and would show that of a plain TensorBoard
    digest = hashlib.sha256(files[SCRIPT]).hexdigest()[:8]
    files[PAGE] = re.sub(rb"(?<=_file_hash=)\w+", digest.encode(), files[PAGE])
    changed = io.BytesIO()
    with zipfile.ZipFile(changed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return lambda: io.BytesIO(changed.getvalue())
