"""
Run the commands of all documentation pages, including the experiments of doc/lab (part of make
test-long).
"""
import pytest

from tests.test_docs import PAGES, clone, run_page  # noqa: F401 (clone is a fixture)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_as_written(page, clone):  # noqa: F811
    run_page(page, clone)
