"""`python -m train paper [NAME ... | regimes]`: the paper's experiments, their figures, and a report of what holds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.synchronize import Event
from types import SimpleNamespace
from typing import Any, NoReturn

import torchcmdp as tc
from torchcmdp.distributed import Crew
from torchcmdp.run.session import Session

from ..program import Count, bar, begin, choose, interrupted, look_at, on_terminal
from .experiment import Job, Outcome, play
from .presets import PRESETS
from .report import write_experiment, write_report

EPISODES, QUICK_EPISODES = 10_000, 100
INSTANCES, QUICK_INSTANCES = 20, 3
LEAST_EPISODES = 11  # two points of a curve, which is logged every 10 episodes and at its end


@dataclass
class Options:
    """Play the paper's experiments and report which of its claims hold; without names, all of them.

    `paper regimes` maps where its headline holds, and has options of its own.

    Names come before options: stochastic-1 to -3, adversarial-reward-1 and -2, adversarial-1 and -2, simplex-1 to -3,
    waking-switching and waking-stochastic. Into LOGDIR/NAME go report.md and a folder an experiment with curves.png (regret above
    the violations) and simplex.png, each also as PDF, summary.csv and TensorBoard runs that overlay the learners. The same command
    continues what was interrupted and reads what is finished.

    Examples:
      python -m train paper
      python -m train paper --quick
      python -m train paper stochastic-1 simplex-2 --episodes 2000 --name two
      python -m train tensorboard --logdir runs/paper
    """

    episodes: Count | None = None  # Episodes of every run; 10,000 by default, 100 with --quick.
    instances: Count | None = None  # Random CMDPs of every experiment; 20 by default, 3 with --quick. Verdicts are over them.
    runs: Count = 3  # Independent runs of every learner on each instance.
    jobs: Count | None = None  # Processes that share the experiments; one a core by default.
    quick: bool = False
    """Few episodes on few instances, into LOGDIR/NAME-quick: to see that all of it works, not to believe its numbers."""
    name: str = "paper"  # Folder of the experiments inside LOGDIR.
    logdir: str = "runs"  # Folder of all experiments.
    fresh: bool = False  # Forget what the folders hold and start over.


def main(arguments: Sequence[str]) -> int:
    """Run the experiments, or map the regimes; returns the exit code."""
    if arguments and arguments[0] == "regimes":
        from . import regimes  # which plays as this module does

        return regimes.main(arguments[1:])
    names, rest = _names(arguments)
    options, folder = begin(Options, rest, "paper", {})
    instances = checked_instances(options, "the report needs")
    episodes = options.episodes or (QUICK_EPISODES if options.quick else EPISODES)
    if episodes < LEAST_EPISODES:
        sentence = f"the report compares how a run begins with how it ends, and needs at least {LEAST_EPISODES}."
        raise tc.InvalidInput(f"--episodes is {episodes}; {sentence}")
    jobs = [
        Job(name, family, episodes, instances, options.runs, folder / name, options.fresh)
        for name in names
        for family in PRESETS[name].families
    ]
    outcomes = play_all(jobs, options.jobs or os.cpu_count() or 1, write_experiment)
    if len(outcomes) < len(jobs) or not all(outcome.completed for outcome in outcomes):
        return interrupted("", options.fresh)
    command = " ".join(["python -m train paper", *arguments])
    report = folder / ("report.md" if len(names) == len(PRESETS) else "report-partial.md")  # a part never replaces the whole
    print(write_report(report, outcomes, command, INSTANCES))
    print(f"\nReport: {report}; figures and tables: {folder}/<experiment>/; {look_at(folder)}")
    return 0


def checked_instances(options: Any, who: str) -> int:
    """How many instances are asked for; refused where there would be no interval over them, or over runs."""
    instances: int = options.instances or (QUICK_INSTANCES if options.quick else INSTANCES)
    for option, value in (("--runs", options.runs), ("--instances", instances)):
        if value < 2:
            raise tc.InvalidInput(f"{option} is 1; {who} intervals over {option[2:]}, and so at least 2.")
    return instances


def _names(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The experiments named before the first option, all of them by default, and the rest of the arguments."""
    split = next((j for j, token in enumerate(arguments) if token.startswith("-")), len(arguments))
    names = list(dict.fromkeys(arguments[:split]))
    for name in names:
        choose(name, PRESETS, "an experiment of the paper")
    for before, name in pairwise(arguments[split:]):
        if name in PRESETS and before not in ("--name", "--logdir"):
            raise tc.InvalidInput(f"{name} stands after an option; names of experiments come first, as in paper {name} --quick.")
    return names or list(PRESETS), list(arguments[split:])


def play_all(jobs: Sequence[Job], workers: int, draw: Callable[[Sequence[Outcome]], None] | None = None) -> list[Outcome]:
    """Play the jobs on as many processes, longest first, and return what came of them in their own order; fewer if interrupted.

    Args:
        jobs: What is to be played.
        workers: How many processes share it.
        draw: Called, in one of them, with all outcomes of an experiment when they are there.
    """
    done: dict[int, Outcome] = {}
    context, alone = multiprocessing.get_context("spawn"), min(workers, len(jobs)) == 1
    counter: Any = SimpleNamespace(value=0) if alone else context.Value("q", 0)
    progress = Progress(jobs, counter)

    def finished(j: int, outcome: Outcome) -> list[Outcome]:
        """Note it; returns the outcomes of its experiment, which differ in their family, where it was the last to be drawn."""
        done[j] = outcome
        progress.finished(jobs[j])
        own = [k for k, job in enumerate(jobs) if job.folder == jobs[j].folder and draw is not None]
        return [done[k] for k in own] if all(k in done and done[k].completed for k in own) else []

    if alone:

        def beat(episodes: int) -> None:
            counter.value += episodes
            progress.show()

        for j, job in enumerate(jobs):
            outcome = play(job, beat)
            if not outcome.completed:
                return [*done.values(), outcome]
            if (own := finished(j, outcome)) and draw is not None:
                draw(own)
        return list(done.values())
    _compile_kernels()
    stop = context.Event()
    # the workers share the cores among themselves, so that none of them needs more than one thread
    for variable in ("OMP_NUM_THREADS", "TORCHCMDP_THREADS"):
        os.environ.setdefault(variable, "1")
    signal.signal(signal.SIGTERM, _on_termination)
    pool = ProcessPoolExecutor(min(workers, len(jobs)), context, _become_worker, (counter, stop))
    try:
        with _stopping(pool, stop):
            order = sorted(range(len(jobs)), key=lambda j: -jobs[j].total)
            futures = {pool.submit(_work, _play, jobs[j]): j for j in order}
            drawn, pending = [], set(futures)
            while pending:
                ready, pending = wait(pending, timeout=0.5, return_when="FIRST_COMPLETED")
                progress.show()
                for future in ready:
                    if own := finished(futures[future], future.result()):
                        drawn.append(pool.submit(_work, draw, own))
            for figures in drawn:
                figures.result()
    except KeyboardInterrupt:
        return []
    except BrokenProcessPool:
        raise tc.TorchCMDPError("a worker process was killed; the same command continues from the last checkpoints.") from None
    return [done[j] for j in sorted(done)]


def _on_termination(number: int, frame: Any) -> NoReturn:
    """SIGTERM is heard once, as ctrl-C: who sends it to a whole group of processes may send it twice."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _stopping(pool: ProcessPoolExecutor, stop: Event) -> Iterator[None]:
    """Whatever ends this early ends the workers: they save what they have, and begin nothing of what they were given already."""
    try:
        yield
    except BaseException:
        stop.set()
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _compile_kernels() -> None:
    """Use the compiled kernels once, so that they lie in the cache and not every worker has to compile them for itself."""
    cmdp = tc.two_path_cmdp()
    for kind in (tc.WCOPS, tc.OptCMDP, tc.OptPrimalDual, tc.PDBPS):
        env = tc.Simulator(cmdp, tc.Bernoulli(cmdp.rewards), tc.Bernoulli(cmdp.costs, low=-1))
        learner = kind.for_env(env, horizon=2)
        learner.update(env.rollout(learner.policy))
        Session(learner, env, 1, 1, Crew(1, alone=True)).advance(1)


_counter: Any = None
_stop: Any = None
_working = False


def _become_worker(counter: Any, stop: Event) -> None:
    global _counter, _stop
    _counter, _stop = counter, stop
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _give_up)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A worker whose parent was killed has nobody to play for, and would keep its folder from whoever continues."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)  # the checkpoints are whole at any moment


def _give_up(number: int, frame: Any) -> None:
    """Outside of a run, which hears signals itself, nothing needs saving; and who only waits for work will be told."""
    if _working:
        raise KeyboardInterrupt


def _work(task: Callable[..., Any], subject: Any) -> Any:
    """A task of a worker, unless all are to stop."""
    global _working
    if _stop.is_set():
        raise KeyboardInterrupt
    _working = True
    try:
        return task(subject)
    finally:
        _working = False


def _play(job: Job) -> Outcome:
    return play(job, _count, _stop.is_set)


def _count(episodes: int) -> None:
    with _counter.get_lock():
        _counter.value += episodes


class Progress:
    """How much is done and how long the rest will take: a bar on a terminal; elsewhere a line now and then, and one an experiment.

    Args:
        jobs: All that is to be played.
        counter: Episodes played so far, by whoever plays.
    """

    def __init__(self, jobs: Sequence[Job], counter: Any) -> None:
        self._counter, self._done = counter, 0
        self._total, self._started = sum(job.total for job in jobs), time.monotonic()
        self._bar = bar(None, "paper", total=self._total, unit="ep", smoothing=0.02)

    def show(self) -> None:
        """Bring the bar up to date; what was read from disk counts when its job is done."""
        now = min(max(self._counter.value, self._done), self._total)
        self._bar.update(max(now - self._bar.n, 0))

    def finished(self, job: Job) -> None:
        """A job is done."""
        self._done += job.total
        what = f"{job.preset}, {job.family}"
        self._bar.set_postfix_str(what, refresh=False)
        self.show()
        if not on_terminal():
            elapsed = time.monotonic() - self._started
            left = elapsed * (self._total - self._done) / self._done
            print(f"{what} constants: done after {elapsed:,.0f} s, about {left:,.0f} s left", file=sys.stderr, flush=True)
        if self._done >= self._total:
            self._bar.close()
