"""The chart of what the lab trains."""
from support.files import replacing
from support.plots import HUES, axes


def running_mean(values, width):
    """At each place the mean of the last `width` values that are not None, or None where there are none."""
    means = []
    for i in range(len(values)):
        seen = [v for v in values[max(0, i - width + 1) : i + 1] if v is not None]
        means.append(sum(seen) / len(seen) if seen else None)
    return means


def training(run, tables, things, path):
    """The course of a `train.Run`, and what each exit of the model, or each step of a head, is worth at its
    end. tables: {file: {"loss", "agreement"}}, lists; things: what they are lists of."""
    figure, ((course, loss, agreed),) = axes(1, 3, width=4.4)
    tokens = [(i + 1) * run.block / 1e6 for i in range(len(run.losses))]
    smooth = running_mean([final for final, _, _ in run.losses], max(1, len(run.losses) // 100))
    course.plot(tokens, smooth, color=HUES[-1], lw=1)
    for (name, table), hue in zip(tables.items(), HUES * len(tables), strict=False):
        first, numbers = run.before[name], range(1, 1 + len(table["loss"]))
        loss.plot(numbers, table["loss"], color=hue, marker=".", label=name.removesuffix(".txt"))
        agreed.plot(numbers, table["agreement"], color=hue, marker=".")
        agreed.plot(numbers, first["agreement"], color=hue, marker=".", ls=":", lw=1)
    top = run.losses[len(run.losses) // 50][0] if run.losses else None      # the first steps dwarf all others
    course.set(xlabel="million tokens", ylabel="nats a token", title="training loss", ylim=(None, top))
    loss.set(xlabel=things, ylabel="nats a token", title="loss on held-out text")
    agreed.set(xlabel=things, ylabel="share of tokens", ylim=(0, 1.02),
               title="agreement with the model; dotted: before")
    for side in (loss, agreed):
        side.xaxis.get_major_locator().set_params(integer=True)
    loss.legend(frameon=False, fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
