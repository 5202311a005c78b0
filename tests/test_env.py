"""Environment variables are typed, have defaults that parse, and are never misread in silence."""

from pathlib import Path

import pytest

from sglang_ascend import env


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda variable: variable.name)
def test_every_variable_is_prefixed_explained_and_has_a_default_that_parses(variable):
    assert variable.name.startswith(env.PREFIX)
    assert variable.meaning
    variable.get({})


def test_every_variable_of_the_module_is_listed():
    declared = [value for value in vars(env).values() if isinstance(value, env.Variable)]
    assert sorted(v.name for v in declared) == sorted(v.name for v in env.VARIABLES)


def test_the_cache_is_the_folder_that_is_named_with_its_home_resolved():
    assert env.CACHE.get({"SGLANG_ASCEND_CACHE": "~/models"}) == Path.home() / "models"


def test_a_trace_is_written_only_where_a_folder_is_named():
    assert env.TRACE.get({}) is None
    assert env.TRACE.get({"SGLANG_ASCEND_TRACE": ""}) is None
    assert env.TRACE.get({"SGLANG_ASCEND_TRACE": "~/t"}) == Path.home() / "t"


def test_a_value_that_does_not_parse_is_one_sentence_with_the_remedy():
    with pytest.raises(env.EnvironmentVariableError) as caught:
        env.CACHE.get({"SGLANG_ASCEND_CACHE": " "})
    message = str(caught.value)
    assert "SGLANG_ASCEND_CACHE=' '" in message
    assert "it must be a path" in message
    assert "unset it" in message
    assert "\n" not in message


def test_a_misspelt_variable_is_reported_with_the_name_it_resembles():
    (sentence,) = env.unknown_variables({"SGLANG_ASCEND_CASHE": "/x", "SGLANG_PLUGINS": "a"})
    assert sentence.startswith("SGLANG_ASCEND_CASHE is set but nothing reads it")
    assert "did you mean SGLANG_ASCEND_CACHE?" in sentence


def test_known_variables_are_not_reported():
    assert env.unknown_variables({variable.name: "x" for variable in env.VARIABLES}) == []
