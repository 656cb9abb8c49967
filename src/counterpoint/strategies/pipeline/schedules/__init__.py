"""Pipeline schedules: in which order a stage runs forwards and backwards of its microbatches.

To add one, copy ``one_f_one_b.py``: a generator of the actions of one stage, the peak number of microbatches in flight,
and a :class:`PipelineSchedule <counterpoint.strategies.pipeline.schedules.schedule.PipelineSchedule>` of both; then add
that to ``SCHEDULES`` in ``registry.py``. Sends, receives and collectives are not part of a schedule:
:mod:`counterpoint.strategies.pipeline.stage_programs` adds them. docs/how-to/write-a-strategy.md lists tests and pages.

Without a change of the library a pipeline takes a function as its schedule, ``Pipeline(4, schedule=function)``
(``own_schedule.py``).
"""
