from extproc.prompt.errors import Unsupported


def test_the_reason_stands_alone_for_metrics_and_first_for_people():
    assert str(Unsupported("multimodal")) == "multimodal"
    problem = Unsupported("template-error", "no such role")
    assert (problem.reason, problem.detail) == ("template-error", "no such role")
    assert str(problem) == "template-error: no such role"
