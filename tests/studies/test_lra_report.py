"""The report of runs of Long Range Arena."""

from pathlib import Path

import pytest

from tests.examples.runs import assert_complete, assert_error
from tests.examples.test_run_lra import RUN, TWO_STEPS, folder, options  # noqa: F401  (a fixture among them)


@pytest.mark.slow
def test_report(call, script, folder, tmp_path, capsys):  # noqa: F811
    path, main = folder("text"), script("report").main
    for seed in (0, 1):
        arguments = options("text", path, tmp_path / "runs" / f"mega{seed}", "--do_eval", "--do_predict", *TWO_STEPS)
        summary = call(*RUN, *arguments, "--seed", seed)
    assert_complete(tmp_path / "runs" / "mega1", summary)
    call(*RUN, *options("text", path, tmp_path / "luna", "--do_eval", *TWO_STEPS, model="luna"))
    capsys.readouterr()
    paths = main(["lra", str(tmp_path / "runs"), str(tmp_path / "luna"), "--output_dir", str(tmp_path / "report")])
    table = [line.split(" | ") for line in Path(paths["report"]).read_text().splitlines()]
    assert table[2][:3] == ["| text", "Luna-4", "–"] and table[2][3].endswith("% (validation)")
    assert table[3][1] == "Mega-chunk" and " ± " in table[3][3] and table[3][4] == "0, 1" and "2 x 4" in table[3]
    assert Path(paths["plot"]).read_bytes().startswith(b"\x89PNG") and capsys.readouterr().out

    # The paper's figure is only compared with runs of the complete task.
    report, complete = script("report"), {"variant": "Mega", "task": "text", "train_samples": 25_000}
    assert report.paper_figure(complete | {"max_length": 4096}) == 90.43
    assert report.paper_figure(complete | {"max_length": 1024}) is None
    for content, message in (("{", "cannot be read"), ("{}", "no all_results.json of a training run")):
        (tmp_path / "luna" / "all_results.json").write_text(content)
        assert_error(lambda: main(["lra", str(tmp_path / "luna")]), message)
