"""The chart of what the lab trains."""
from files import replacing
from notebooks.plots import HUES, axes


def running_mean(values, width):
    """At each place the mean of the last `width` values, or of all so far."""
    parts = (values[max(0, i - width) : i] for i in range(1, 1 + len(values)))
    return [sum(part) / len(part) for part in parts]


def training(run, tables, things, path):
    """The course of a `train.Run`, and how often each exit of the model, or each step of a head,
    agrees with the model at its end. tables: {file: {"agreement": a list}}; things: what
    it is a list of."""
    figure, ((course, agreed),) = axes(1, 2)
    tokens = [(i + 1) * run.block / 1e6 for i in range(len(run.losses))]
    course.plot(tokens, running_mean([final for final, _, _ in run.losses], len(tokens) // 100 + 1))
    for (name, table), hue in zip(tables.items(), HUES * len(tables), strict=False):
        numbers = range(1, 1 + len(table["agreement"]))
        agreed.plot(numbers, table["agreement"], color=hue, marker=".",
                    label=name.removesuffix(".txt"))
        agreed.plot(numbers, run.before[name]["agreement"], color=hue, marker=".", ls=":", lw=1)
    top = run.losses[len(tokens) // 50][0]      # the first steps dwarf all others
    course.set(xlabel="million tokens", ylabel="nats a token", title="training loss",
               ylim=(None, top))
    agreed.set(xlabel=things, ylim=(0, 1.02), title="agreement on held-out text; dotted: before")
    agreed.xaxis.get_major_locator().set_params(integer=True)
    agreed.legend(frameon=False, fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
