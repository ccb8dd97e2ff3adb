"""Many requests at once: each decoded as if it were alone, their passes run together (see ``lane.py``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider.engines.bundle import Bundle
from outrider.engines.engine import PREFILL_CHUNK, served_tiers
from outrider.engines.errors import OutriderError
from outrider.engines.open import Opener, open_packed, open_single
from outrider.engines.packed import Segment, SequencesEngine
from outrider.runtime.accept import ExactRule
from outrider.runtime.batch_costs import measure_costs
from outrider.runtime.controller import DEFAULT_PRIORS, Controller
from outrider.runtime.decode import Request, decode
from outrider.runtime.drafters.roster import WITH_MODEL, Roster
from outrider.runtime.generation import GenerationResult, Speculation, StreamedToken, cancel, result_of, streamed
from outrider.runtime.intake import Intake
from outrider.runtime.lane import Lane, LaneModel
from outrider.runtime.prefixes import PrefixStore, common
from outrider.runtime.sampling.options import SamplingOptions
from outrider.runtime.scheduler import DRAFT, TARGET, FreeLane, Waiting, choose_lane, next_turn
from outrider.runtime.text import Message
from outrider.runtime.tuning import tuned_priors

PREFIX_BYTES = 256 << 20
PREFILL_ROWS = 64  # of a prompt that are fed beside a round of the others


@dataclass(eq=False)
class Job:
    """A request in a batch. ``streamed`` counts the tokens that were taken of it; it is over when ``done``, by
    ``failure`` if that is not None.
    """

    request: Request
    speculation: Speculation
    done: bool = False
    failure: BaseException | None = None
    lane: Lane | None = None
    streamed: int = 0
    cancelled: bool = False

    def new_tokens(self) -> list[StreamedToken]:
        """What was committed since the last call."""
        output = self.request.output
        start, self.streamed = self.streamed, len(output.tokens)
        return [streamed(output, position) for position in range(start, self.streamed)]


class Batch:
    """A loaded bundle for up to ``lanes`` requests at once; further ones wait for a lane.

    Not for several threads: ``service.py`` is. Nothing runs but in ``step``.

    Args:
        target, draft: over as many sequences as there are lanes; None for a bundle without a draft.
        exactness: ``bitwise`` where the text of a request does not depend on the others.
        prefix_bytes: for caches of texts whose lane another request took.
    """

    def __init__(
        self,
        bundle: Bundle,
        target: SequencesEngine,
        draft: SequencesEngine | None,
        exactness: str,
        prefix_bytes: int = PREFIX_BYTES,
    ) -> None:
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.tiers = served_tiers(bundle.manifest.tiers, target.table)
        self.exactness = exactness
        self.intake = Intake(bundle, self.tiers, target.device)
        self.codec = self.intake.codec
        self.engines = {TARGET: target} | ({} if draft is None else {DRAFT: draft})
        self.prefixes = PrefixStore(self.engines, prefix_bytes)
        self.lanes = [self._lane(number) for number in range(target.sequences)]
        self.costs = measure_costs(target, draft, max(self.tiers))
        priors = tuned_priors(bundle) or DEFAULT_PRIORS
        self._controllers = [Controller(self.costs, priors, clocked=False) for _ in self.lanes]
        for controller in self._controllers:
            controller.share_shares(self._controllers[0])
        self._learned = self._controllers[0]  # of the request that ended last
        self._jobs: dict[int, Job] = {}  # by lane
        self._used = [0] * len(self.lanes)  # when a lane was last used, and last fed
        self._fed = [0] * len(self.lanes)
        self._time = 0
        self.queue: deque[Job] = deque()

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        lanes: int,
        threads: int | None = None,
        provider: str = "cpu",
        prefix_bytes: int = PREFIX_BYTES,
    ) -> Batch:
        """Open a bundle.

        Args:
            provider: one of ``engines.open.PROVIDERS``; another than ``cpu`` runs one request at a time.

        Raises:
            OutriderError: the bundle is not whole, cannot run here, or not so many requests at once.
        """
        bundle = Bundle(folder)
        if provider != "cpu" and lanes > 1:
            raise OutriderError(f"--provider {provider} serves one request at a time; use --max-batch 1")
        if lanes == 1 and (provider != "cpu" or bundle.manifest.target.packed_graph not in bundle.files):
            opener, tiers = Opener(bundle, threads), bundle.manifest.tiers
            single, exactness = open_single(opener, "target", provider, tiers)
            drafting = open_single(opener, "draft", provider, tiers)[0] if bundle.manifest.draft else None
            return cls(bundle, single, drafting, exactness, prefix_bytes)
        tiers = bundle.manifest.tiers
        rows = lanes * (max(tiers) + 1) + max(PREFILL_ROWS, max(tiers) + 1)
        target, exactness = open_packed(bundle, "target", sequences=lanes, most_rows=rows, threads=threads)
        draft = None
        if bundle.manifest.draft:
            draft, _ = open_packed(bundle, "draft", sequences=lanes, most_rows=rows, threads=threads)
        return cls(bundle, target, draft, exactness, prefix_bytes)

    def submit(
        self, prompt: str | Sequence[Message] | Sequence[int], options: SamplingOptions, **speculation: Any
    ) -> Job:
        """Queue a request; see ``new_job``."""
        job = self.new_job(prompt, options, **speculation)
        self.queue.append(job)
        return job

    def new_job(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        options: SamplingOptions,
        *,
        k: int | None = None,
        drafter: str | None = None,
        acceptance: str = "exact",
    ) -> Job:
        """A request that is not queued yet; see ``Pipeline.stream``. A prompt may be token ids. From any thread.

        Raises:
            OutriderError: as ``Pipeline.stream`` does.
        """
        speculation = self.intake.speculation(drafter, k, acceptance)
        ids = self.intake.encode(prompt)
        return Job(self.intake.new_request(ids, options, acceptance), speculation)

    @property
    def jobs(self) -> list[Job]:
        """All that are not done."""
        return [*self._jobs.values(), *self.queue]

    @property
    def running(self) -> int:
        return len(self._jobs)

    def cache_share(self) -> float:
        """Share of the lanes' cache positions that hold a token."""
        held = sum(lane.target.length for lane in self.lanes)
        return held / (len(self.lanes) * self.manifest.max_length)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._jobs or self.queue)

    def step(self) -> list[Job]:
        """Cancel, admit, and run one round; the jobs that have something new."""
        return list(dict.fromkeys([*self._drop_cancelled(), *self._admit(), *self._round()]))

    def abandon(self) -> None:
        """Free all lanes; jobs that are not done stay so."""
        for job in self.jobs:
            if job.lane is not None:
                job.lane.stop()
                self._release(job.lane)
        self.queue.clear()

    def result(self, job: Job) -> GenerationResult:
        """Of a job that is done.

        Raises:
            OutriderError: what ended it.
        """
        if job.failure is not None:
            raise job.failure
        return result_of(job.request, job.speculation, self.exactness, self.costs.origin)

    def _lane(self, number: int) -> Lane:
        alone = self.engines[TARGET].sequences == 1  # nobody waits for long passes then
        chunk = PREFILL_CHUNK if alone else max(PREFILL_ROWS, max(self.tiers) + 1)
        chunk = min(chunk, self.engines[TARGET].most_rows)
        models = {role: LaneModel(engine, role, number, chunk) for role, engine in self.engines.items()}
        draft = models.get(DRAFT)
        drafter = self.intake.model_drafter(draft) if draft is not None else None
        return Lane(number, models[TARGET], draft, Roster(drafter, self.intake.next_tokens))

    def _drop_cancelled(self) -> list[Job]:
        dropped = [job for job in (*self.queue, *self._jobs.values()) if job.cancelled]
        for job in dropped:
            if job.lane is None:
                self.queue.remove(job)
            else:
                job.lane.stop()
                self._release(job.lane)
            cancel(job.request, job.streamed)
            job.done = True
        return dropped

    def _admit(self) -> list[Job]:
        """Give lanes to those who have waited longest; jobs with nothing to generate are done at once."""
        done = [self._finish(lane) for lane in self.lanes if lane.number in self._jobs and lane.pending is None]
        for job in list(self.queue):
            prompt = job.request.history.tokens
            if job.request.output.finish_reason is not None:
                self.queue.remove(job)
                job.done = True
                done.append(job)
                continue
            if self.running == len(self.lanes):
                break
            if self._being_read(prompt):
                continue
            self.queue.remove(job)
            free = [lane for lane in self.lanes if lane.number not in self._jobs]
            offers = [
                FreeLane(lane.number, common(lane.target.tokens, prompt), lane.target.length, self._used[lane.number])
                for lane in free
            ]
            lane = self.lanes[choose_lane(offers)]
            self._keep_prefix(lane, prompt)
            job.lane = lane
            self._jobs[lane.number] = job
            lane.start(self._decoding(job, lane))
            if lane.pending is None:
                done.append(self._finish(lane))
        return done

    def _being_read(self, prompt: Sequence[int]) -> bool:
        """Whether a lane is just reading a good part of a prompt that no cache has yet: then it is waited for."""
        reading = [job.request.history.tokens for job in self._jobs.values() if not job.request.output.tokens]
        if not reading:
            return False
        soon = max(common(tokens, prompt) for tokens in reading)
        return soon - max(common(lane.target.tokens, prompt) for lane in self.lanes) > PREFILL_ROWS

    def _keep_prefix(self, lane: Lane, prompt: Sequence[int]) -> None:
        """Have the lane's caches hold what any cache holds of the prompt; what it held else goes to the store."""
        shared = [role for role in lane.models if role == TARGET or not self.manifest.translated]  # of the same ids
        models = {role: lane.models[role] for role in shared}
        known = prompt[:-1]  # its last token is to be appended
        kept = self.prefixes.find(known)  # before others take its room
        if common(lane.target.tokens, prompt) < lane.target.length:
            self.prefixes.save(lane.number, {role: model.tokens for role, model in models.items()})
        for role, model in models.items():
            model.keep(prompt)
            others = [common(other.models[role].tokens, known) for other in self.lanes]
            best = max(range(len(others)), key=others.__getitem__)
            if others[best] > model.length:
                self.engines[role].copy(best, lane.number, model.length, others[best])
            end = max(model.length, others[best])
            if kept is not None:
                end = self.prefixes.restore(kept, lane.number, role, end, known)
            model.tokens += prompt[model.length : end]

    def _decoding(self, job: Job, lane: Lane) -> Callable[[], None]:
        request, (name, k) = job.request, (job.speculation.drafter, job.speculation.k)
        if k is None:
            free = isinstance(request.rule, ExactRule)
            controller = self._controllers[lane.number]
            controller.go_on_from(self._learned)
            drafter = lane.roster.adaptive(name, controller, request.stats, free=free)
            k = max(self.tiers)
        else:
            drafter = lane.roster.drafter(name)

        def run() -> None:
            for _ in decode(lane.target, drafter, k, request):
                pass

        return run

    def _round(self) -> list[Job]:
        fed: set[str] = set()
        touched: list[Job] = []
        while turn := next_turn(self._waiting(), fed):
            touched += self._run(turn.role, [self.lanes[number] for number in turn.lanes])
            if turn.feeds:
                fed.add(turn.role)
                self._time += 1
                self._fed[turn.lanes[-1]] = self._time
            if turn.role == TARGET:
                break
        return touched

    def _waiting(self) -> list[Waiting]:
        pending = [(lane.number, lane.pending) for lane in self.lanes if lane.pending is not None]
        rows = max(self.tiers) + 1
        return [
            Waiting(number, wanted.role, len(wanted.segment.tokens) > rows, self._fed[number])
            for number, wanted in pending
        ]

    def _run(self, role: str, lanes: Sequence[Lane]) -> list[Job]:
        """One pass; all that waited for it go on to their next one."""
        jobs = [self._jobs[lane.number] for lane in lanes]
        segments = [lane.pending.segment for lane in lanes if lane.pending is not None]
        start = perf_counter()
        try:
            rows: Sequence[Any] = self.engines[role].run(segments)
        except OutriderError as error:
            for lane in lanes:
                lane.fail(error)
        else:
            count = sum(len(segment.tokens) for segment in segments)
            self.costs.ran(role, len(lanes), count, perf_counter() - start)
            if role == TARGET:
                self._read_along(lanes, segments)
                self.costs.begin(self.running)  # the lanes choose their next rounds now
            for lane, own in zip(lanes, rows, strict=True):
                lane.resume(own)
        for lane in lanes:
            if lane.pending is None:
                self._finish(lane)
        return jobs

    def _read_along(self, lanes: Sequence[Lane], segments: Sequence[Segment]) -> None:
        """Have draft models read the prompts that the target reads, so that they can draft with the first round."""
        reading = []
        for lane, segment in zip(lanes, segments, strict=True):
            job = self._jobs[lane.number]
            drafting = job.speculation.drafter in WITH_MODEL and not self.manifest.translated
            draft = lane.draft if drafting and not job.request.output.tokens else None
            if draft and draft.length == segment.length and draft.length + len(segment.tokens) <= draft.max_length:
                reading.append((draft, segment._replace(wanted=1)))
        if not reading:
            return
        with suppress(OutriderError):  # it is asked again where it is to draft
            self.engines[DRAFT].run([segment for _, segment in reading])
            for draft, segment in reading:
                draft.tokens += segment.tokens

    def _finish(self, lane: Lane) -> Job:
        job = self._jobs[lane.number]
        if job.speculation.k is None:
            self._learned = self._controllers[lane.number]
        job.failure = lane.failure
        job.done = True
        self._release(lane)
        return job

    def _release(self, lane: Lane) -> None:
        self._time += 1
        self._used[lane.number] = self._time
        del self._jobs[lane.number]
