"""The refusals that take more than a row of a table, by the test that produces them.

tests/hisparse/test_refusals.py looks here for what its tables have not reached; tests/conftest.py checks that each test
reaches what it stands for.
"""

from __future__ import annotations

from typing import Final

PRODUCED: Final = {
    "tests/coordinator/gateway/test_gateway.py::test_attach_continues_at_offset_even_after_the_end": [
        "coordinator/gateway/gateway.py:_attach:BadInput"
    ],
    "tests/coordinator/gateway/test_gateway.py::test_connections_are_bounded_and_dead_ones_are_evicted": [
        "coordinator/gateway/connections.py:open:CapacityError"
    ],
    "tests/coordinator/gateway/test_gateway.py::test_forbidden_client_message_is_refused_and_counted[name]": [
        "coordinator/gateway/gateway.py:_greet:BadInput"
    ],
    "tests/coordinator/journal/test_damage.py::test_salvage_keeps_whole_records": [
        "hisparse/cli/journal.py:check:ConfigError"
    ],
    "tests/coordinator/scheduling/test_scheduler.py::test_abort_in_every_state[QUEUED]": [
        "coordinator/scheduling/commands.py:find:WrongState"
    ],
    "tests/coordinator/scheduling/test_scheduler.py::test_commands_are_checked_before_any_takes_effect": [
        "coordinator/scheduling/commands.py:check_size:CapacityError",
        "coordinator/scheduling/commands.py:find:BadInput",
    ],
    "tests/coordinator/scheduling/test_scheduler.py::test_disconnected_worker_is_listed_until_it_is_forgotten": [
        "coordinator/scheduling/worker_registry.py:_forgettable:WrongState",
        "coordinator/scheduling/worker_registry.py:_no_worker:NotFound",
        "coordinator/scheduling/worker_registry.py:forget:BadInput",
    ],
    "tests/coordinator/scheduling/test_scheduler.py::test_new_pool_has_no_rows_of_the_last[exit proved]": [
        "coordinator/scheduling/worker_registry.py:_check_pool_is_left:Unavailable"
    ],
    "tests/coordinator/scheduling/test_scheduler.py::test_new_pool_waits_until_the_last_ledger_is_closed": [
        "coordinator/scheduling/worker_registry.py:join:Unavailable"
    ],
    "tests/coordinator/scheduling/test_scheduler.py::test_no_request_is_accepted_before_the_first_worker": [
        "coordinator/scheduling/submission.py:submit:Unavailable#2"
    ],
    "tests/coordinator/scheduling/test_scheduler.py::test_stop_finishes_running_work_and_refuses_more": [
        "coordinator/scheduling/submission.py:submit:Unavailable"
    ],
    "tests/coordinator/scheduling/test_scheduler.py::test_tokens_and_sampling_are_checked": [
        "coordinator/scheduling/validation.py:_check_sampling:BadInput#3",
        "coordinator/scheduling/validation.py:_check_tokens:BadInput",
    ],
    "tests/coordinator/scheduling/test_scheduler.py::test_worker_that_may_still_write_pages_is_not_forgotten": [
        "coordinator/scheduling/worker_registry.py:_forgettable:WrongState#2"
    ],
    "tests/coordinator/scheduling/test_scheduler.py::test_worker_with_another_model_or_pool_is_refused": [
        "coordinator/scheduling/worker_registry.py:_check_epoch:Unavailable",
        "coordinator/scheduling/worker_registry.py:_check_epoch:WrongState",
        "coordinator/scheduling/worker_registry.py:_check_model:ConfigError",
        "coordinator/scheduling/worker_registry.py:_check_pool:ConfigError",
    ],
    "tests/hisparse/test_cli.py::test_drain_waits_until_the_workers_are_drained": [
        "hisparse/console/session.py:_until_drained:NotFound"
    ],
    "tests/hisparse/test_cli.py::test_what_a_request_waits_for_is_told_once_for_each_kind": [
        "hisparse/cli/streaming.py:_timed:Unavailable#2"
    ],
    "tests/hisparse/test_client_asyncio.py::test_detached_and_closed_streams_end": [
        "hisparse/client/asyncio_connection.py:_closed:Unavailable"
    ],
    "tests/hisparse/test_cluster_start.py::test_a_group_that_never_completes_leaves_nothing_running": [
        "hisparse/cluster/up.py:started:Unavailable"
    ],
    "tests/hisparse/test_cluster_start.py::test_a_rank_that_has_lost_a_peer_is_not_blamed[codes0-ConfigError-w1]": [
        "hisparse/cluster/up.py:_raise_ended:ConfigError"
    ],
    "tests/hisparse/test_demo_parts.py::test_too_little_text_is_refused_with_the_count": [
        "hisparse/demo/plan.py:_cut:BadInput",
        "hisparse/demo/plan.py:cut_prompts:BadInput",
    ],
    "tests/hisparse/test_http.py::test_a_model_without_a_template_refuses_chats": [
        "hisparse/http/asks.py:chat_prompt:BadInput"
    ],
    "tests/hisparse/test_http.py::test_a_prompt_longer_than_the_context_is_refused[prompt0]": [
        "hisparse/http/asks.py:_check_length:ContextExceeded"
    ],
    "tests/hisparse/test_http.py::test_a_refused_body_names_its_field[body4-prompt]": [
        "hisparse/http/prompts.py:_check_count:BadInput"
    ],
    "tests/hisparse/test_http.py::test_growing_template_is_ended_and_the_next_is_rendered[{{ messages | tojson(indent=n) }}]": [  # noqa: E501
        "hisparse/http/renderers.py:render:ContextExceeded"
    ],
    "tests/hisparse/test_http.py::test_only_ignored_fields_may_be_large": ["hisparse/http/bodies.py:read_raw:BadInput"],
    "tests/hisparse/test_http.py::test_output_whose_grammar_became_too_much_is_the_clients_error[lines]": [
        "hisparse/http/errors.py:ending_error:BadInput"
    ],
    "tests/hisparse/test_http.py::test_unrenderable_chat_is_refused_with_the_reason[body5-old name]": [
        "hisparse/http/chat_bodies.py:check:BadInput#2"
    ],
    "tests/hisparse/test_http_agents.py::test_progress_is_that_of_the_owners_request": [
        "hisparse/http/progress.py:of:NotFound",
        "hisparse/http/progress.py:of:NotFound#2",
    ],
    "tests/hisparse/test_http_apis.py::test_long_prompts_are_not_sent_back": [
        "hisparse/http/asks.py:echoes_of:BadInput"
    ],
    "tests/hisparse/test_http_apis.py::test_tools_and_arguments_are_bounded": ["hisparse/http/tools.py:call:BadInput"],
    "tests/hisparse/test_http_control.py::test_front_that_hangs_is_named": [
        "hisparse/http/control.py:_ask:Unavailable"
    ],
    "tests/hisparse/test_http_errors.py::test_error_of_the_coordinator_names_no_setting_and_no_command[raised1-400-context_length_exceeded-prompt-prompt: no worker has 9 host pages. Shorten it]": [  # noqa: E501
        "hisparse/http/answering.py:_accepted:ContextExceeded"
    ],
    "tests/hisparse/test_http_formats.py::test_turns_that_deepseek_cannot_read_are_refused[turns0-turn 1 is the result of no call]": [  # noqa: E501
        "hisparse/http/formats/deepseek.py:_refusal:BadInput"
    ],
    "tests/hisparse/test_http_front.py::test_a_body_must_come_in_time": ["hisparse/http/exchange.py:body:TooSlow"],
    "tests/hisparse/test_http_front.py::test_id_in_use_refuses_another_body": [
        "hisparse/http/outputs.py:following:WrongState"
    ],
    "tests/hisparse/test_http_front.py::test_invalid_id_is_refused[a b]": [
        "coordinator/scheduling/validation.py:check_name:BadInput"
    ],
    "tests/hisparse/test_http_front.py::test_invalid_id_is_refused[name1]": [
        "hisparse/http/answering.py:_check_id:BadInput"
    ],
    "tests/hisparse/test_http_front.py::test_missing_coordinator_is_answered_with_503": [
        "hisparse/client/connection.py:_connection_lost:ConnectionLost",
        "hisparse/http/link.py:client:Unavailable",
    ],
    "tests/hisparse/test_http_front.py::test_oversized_body_is_refused_while_it_arrives": [
        "hisparse/http/exchange.py:_too_large:TooLarge"
    ],
    "tests/hisparse/test_http_front.py::test_paths_and_methods[GET-/v1/models/other-404]": [
        "hisparse/http/front.py:_model:NotFound"
    ],
    "tests/hisparse/test_http_front.py::test_priority_above_the_limit_of_a_key_is_refused": [
        "coordinator/scheduling/validation.py:check_priority:BadInput"
    ],
    "tests/hisparse/test_http_front.py::test_refused_and_abandoned_bodies_free_their_bytes": [
        "hisparse/http/api_keys.py:check:Unauthorized"
    ],
    "tests/hisparse/test_http_front.py::test_request_beyond_the_context_is_not_sent": [
        "coordinator/scheduling/validation.py:_check_sampling:BadInput#2"
    ],
    "tests/hisparse/test_http_front.py::test_request_that_no_worker_can_take_gets_503_and_is_aborted[whole]": [
        "hisparse/http/answering.py:_refusal:Unavailable"
    ],
    "tests/hisparse/test_http_front.py::test_requests_past_the_limit_get_retry_after": [
        "hisparse/http/body_reader.py:place_in:CapacityError"
    ],
    "tests/hisparse/test_http_front.py::test_total_body_bytes_are_bounded": [
        "hisparse/http/exchange.py:_read:CapacityError"
    ],
    "tests/hisparse/test_http_large_bodies.py::test_body_that_takes_too_long_is_refused": [
        "hisparse/http/large_bodies.py:check:BadInput"
    ],
    "tests/hisparse/test_http_tls.py::test_bad_pair_is_refused_naming_the_file": [
        "hisparse/http/tls.py:_refused:ConfigError"
    ],
    "tests/hisparse/test_leftovers.py::test_requests_of_another_model_refuse_the_start_with_all_choices": [
        "hisparse/cluster/leftovers.py:_refusal:ConfigError"
    ],
    "tests/hisparse/test_leftovers.py::test_the_wait_for_aborted_requests_is_bounded": [
        "hisparse/cluster/leftovers.py:check_leftovers:Unavailable"
    ],
    "tests/worker/device/test_capacity.py::test_traces_of_other_models_are_refused[topk]": [
        "hisparse/cli/size.py:_read_trace:BadInput"
    ],
    "tests/hisparse/test_ray_plan.py::test_refusals_of_the_plan_name_the_remedy": [
        "hisparse/ray/plan.py:_does_not_fit:CapacityError",
        "hisparse/ray/plan.py:home_of:NotFound",
        "hisparse/ray/plan.py:require_transfer:ConfigError",
        "hisparse/ray/settings.py:check_asked:ConfigError",
        "hisparse/ray/settings.py:check_asked:ConfigError#2",
        "hisparse/ray/settings.py:_require_room:CapacityError",
        "hisparse/ray/settings.py:check_asked:ConfigError#3",
        "hisparse/ray/settings.py:check_asked:ConfigError#4",
        "hisparse/ray/settings.py:check_asked:ConfigError#5",
    ],
    "tests/hisparse/test_ray_plan.py::test_ray_that_does_not_answer_is_refused_by_name": [
        "hisparse/ray/ray_cluster.py:__init__:Unavailable",
        "hisparse/ray/ray_cluster.py:_get:Unavailable",
        "hisparse/ray/ray_cluster.py:_handles:Unavailable",
        "hisparse/ray/ray_cluster.py:_ray:ConfigError",
    ],
    "tests/hisparse/test_ray_plan.py::test_node_that_cannot_write_its_files_says_so_and_ends_the_driver": [
        "hisparse/ray/host.py:_write_files:ConfigError"
    ],
    "tests/hisparse/test_ray_plan.py::test_up_does_not_join_a_part_of_a_cluster": [
        "hisparse/ray/up.py:start_or_join:WrongState#2"
    ],
    "tests/hisparse/test_ray_plan.py::test_pool_that_stays_needs_no_room_and_what_has_no_place_stops_nothing": [
        "hisparse/ray/up.py:make_way:ConfigError",
        "hisparse/ray/up.py:make_way:ConfigError#2",
    ],
    "tests/hisparse/test_ray_plan.py::test_node_that_cannot_be_looked_at_ends_the_command": [
        "hisparse/ray/ray_cluster.py:nodes:Unavailable",
    ],
    "tests/hisparse/test_ray_plan.py::test_place_that_ray_does_not_give_is_refused": [
        "hisparse/ray/ray_cluster.py:start:CapacityError",
    ],
    "tests/hisparse/test_ray_plan.py::test_down_of_nothing_and_up_beside_another_are_refused": [
        "hisparse/ray/up.py:run_ray_down:NotFound",
        "hisparse/ray/up.py:start_or_join:WrongState",
    ],
    "tests/hisparse/test_ray_plan.py::test_node_that_answers_and_does_not_stop_is_not_replaced_by_any_word": [
        "hisparse/ray/up.py:make_way:Unavailable",
    ],
    "tests/hisparse/test_ray_plan.py::test_processes_that_run_on_are_not_replaced_without_an_operators_word": [
        "hisparse/ray/up.py:_may_run_on:Unavailable",
    ],
    "tests/hisparse/test_ray_plan.py::test_options_that_do_not_go_together_are_refused[groups]": [
        "hisparse/cli/serve.py:up:UsageError#2"
    ],
    "tests/hisparse/test_ray_plan.py::test_options_that_do_not_go_together_are_refused[sure]": [
        "hisparse/cli/serve.py:up:UsageError"
    ],
    "tests/hisparse/test_ray_plan.py::test_options_that_do_not_go_together_are_refused[workers]": [
        "hisparse/cli/serve.py:_up_on_ray:UsageError"
    ],
}

#: The test that produces a site.
OTHER_TESTS: Final = {site: test for test, sites in PRODUCED.items() for site in sites}
