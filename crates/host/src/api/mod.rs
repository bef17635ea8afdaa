//! The controller's HTTP API.
//!
//! - `GET /v1/vms`: the [`HostView`] as JSON.
//! - `PUT /v1/vms/{name}/tiers`: [`Tiers`]; sets a VM's desired size.
//! - `PUT /v1/vms/{name}`: a VM's section as JSON; adds the VM.
//! - `DELETE /v1/vms/{name}?running=true`: removes a VM.
//! - `PUT /v1/vms/{name}/settings`: [`VmChange`]; changes guarantee, limit, share, service level or pool.
//! - `DELETE /v1/vms/{name}/settings`: makes the VM follow the configuration's file again.
//! - `POST /v1/vms/{name}/forgive`: lifts the hostile mark of a VM.
//! - `PUT /v1/policy`: [`PolicyChoice`]; sets the policy that divides memory.
//! - `DELETE /v1/policy`: makes the policy follow the configuration's file again.
//! - `GET /v1/config`: the configuration in use, as JSON.
//! - `POST /v1/reload`: reads the configuration's file again; answers the keys that changed.
//! - `POST /v1/evacuate`: gives every VM all its memory back, or says what is missing.
//! - `GET /v1/events?after=N`: the last events with numbers above N, oldest first.
//! - `GET /metrics`: for Prometheus.
//!
//! A refused request is answered with a [`Problem`], and the status says whose fault it is. File
//! permissions control access to the Unix socket. TCP clients must send `Authorization: Bearer
//! TOKEN`.

mod listen;

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Extension, Json, Router};
use demeter_http::{Limits, Peer};
use demeter_policy::provision::Policy;
use demeter_policy::{ByteCount, MIB, PerTier};
use serde::Deserialize;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, oneshot, watch};

pub use listen::{ListenError, Token, tcp, unix};

use crate::VmName;
pub use crate::body::{PolicyChoice, Problem, Tiers};
use crate::config::{Asked, Config, KeyChange, VmChange};
use crate::metrics;
use crate::view::{EventLog, HostView};

/// Maximum length of a request body; valid ones have less than a hundred bytes.
const BODY_BYTES_MAX: usize = 4096;

/// A change that a client requests of the controller.
#[derive(Debug)]
pub enum Change {
    /// Lift the hostile mark of a VM.
    Forgive {
        /// The VM.
        vm: VmName,
        /// Channel for the answer.
        answer: oneshot::Sender<Result<(), ChangeError>>,
    },
    /// Give every VM all its memory back.
    Evacuate {
        /// Channel for the answer.
        answer: oneshot::Sender<Result<(), ChangeError>>,
    },
    /// Read the configuration's file again.
    Reload {
        /// Channel for the answer: the keys that changed.
        answer: oneshot::Sender<Result<Vec<KeyChange>, ChangeError>>,
    },
    /// Set a VM's desired size.
    SetTiers {
        /// The VM.
        vm: VmName,
        /// Sizes of the tiers that change.
        tiers: PerTier<Option<ByteCount>>,
        /// Channel for the answer.
        answer: oneshot::Sender<Result<(), ChangeError>>,
    },
    /// Add, change or remove a VM.
    Setting {
        /// The VM.
        vm: VmName,
        /// The action.
        asked: Asked,
        /// Whether it may be removed while it runs.
        may_run: bool,
        /// Channel for the answer.
        answer: oneshot::Sender<Result<(), ChangeError>>,
    },
    /// Choose another policy.
    SetPolicy {
        /// The policy; `None` for that of the configuration's file.
        policy: Option<Policy>,
        /// Channel for the answer.
        answer: oneshot::Sender<Result<(), ChangeError>>,
    },
}

/// Reason why the controller refuses a change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// There is no such VM.
    #[error("there is no VM {0}; demeter host status lists them")]
    NoVm(VmName),
    /// The change violates a limit or the pool.
    #[error("{0}")]
    Conflict(String),
    /// The change could not be saved.
    #[error("{0}")]
    State(String),
}

/// The API's access to the controller; cheap to clone.
#[derive(Debug, Clone)]
pub struct Handle {
    /// The latest snapshot.
    pub view: watch::Receiver<Arc<HostView>>,
    /// The configuration in use.
    pub config: watch::Receiver<Arc<Config>>,
    /// Recent events.
    pub log: EventLog,
    /// Channel to the controller: changes, and who asks for them.
    pub changes: mpsc::Sender<(Peer, Change)>,
}

/// Serves the API on a Unix socket until cancelled.
pub async fn serve_unix(listener: UnixListener, handle: Handle) -> Infallible {
    let all = router(handle.clone()).merge(local_router(handle));
    demeter_http::serve(listener, all, Limits::default()).await
}

/// Serves the API over TCP to clients with the token, until cancelled.
pub async fn serve_tcp(listener: TcpListener, handle: Handle, token: Token) -> Infallible {
    let guarded = router(handle).layer(middleware::from_fn_with_state(Arc::new(token), authorize));
    demeter_http::serve(listener, guarded, Limits::default()).await
}

fn router(handle: Handle) -> Router {
    Router::new()
        .route("/v1/vms", get(vms))
        .route("/v1/vms/{name}", delete(remove))
        .route("/v1/vms/{name}/settings", put(set))
        .route("/v1/vms/{name}/settings", delete(reset))
        .route("/v1/vms/{name}/tiers", put(set_tiers))
        .route("/v1/vms/{name}/forgive", post(forgive))
        .route("/v1/policy", put(set_policy))
        .route("/v1/policy", delete(reset_policy))
        .route("/v1/config", get(config))
        .route("/v1/reload", post(reload))
        .route("/v1/evacuate", post(evacuate))
        .route("/v1/events", get(events))
        .route("/metrics", get(prometheus))
        .fallback(async || problem(StatusCode::NOT_FOUND, NO_ROUTE))
        .method_not_allowed_fallback(async || problem(StatusCode::METHOD_NOT_ALLOWED, NO_METHOD))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(handle)
}

/// Routes of the Unix socket only. A VM's section names sockets and cgroups, which the controller
/// opens with its own rights.
fn local_router(handle: Handle) -> Router {
    Router::new()
        .route("/v1/vms/{name}", put(add))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(handle)
}

const NO_ROUTE: &str = "there is no such path; docs/src/api.md lists all";
const NO_METHOD: &str = "this path has other methods; docs/src/api.md lists them";

async fn authorize(State(token): State<Arc<Token>>, request: Request, next: Next) -> Response {
    let shown = request.headers().get(header::AUTHORIZATION);
    let shown = shown.and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    if shown.is_some_and(|shown| token.matches(shown)) {
        return next.run(request).await;
    }
    let error = "send the token of token_file: Authorization: Bearer TOKEN";
    problem(StatusCode::UNAUTHORIZED, error)
}

async fn vms(State(handle): State<Handle>) -> Response {
    let view = handle.view.borrow().clone();
    Json(&*view).into_response()
}

async fn prometheus(State(handle): State<Handle>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let view = handle.view.borrow().clone();
    ([(header::CONTENT_TYPE, kind)], metrics::text(view))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct After {
    #[serde(default)]
    after: u64,
}

async fn events(
    State(handle): State<Handle>,
    after: Result<Query<After>, QueryRejection>,
) -> Response {
    match after {
        Ok(Query(After { after })) => Json(handle.log.after(after)).into_response(),
        Err(rejected) => rejected_query(&rejected),
    }
}

async fn set_tiers(
    State(handle): State<Handle>,
    Extension(peer): Extension<Peer>,
    Path(name): Path<String>,
    tiers: Result<Json<Tiers>, JsonRejection>,
) -> Response {
    let tiers = match tiers {
        Ok(Json(tiers)) => tiers,
        Err(rejected) => return rejected_body(&rejected),
    };
    if tiers == Tiers::default() {
        let error = "name fast_mib, slow_mib or both";
        return problem(StatusCode::BAD_REQUEST, error);
    }
    // Saturation is safe: no pool has that much memory.
    let bytes = |mib: Option<u64>| mib.map(|mib| ByteCount(mib.saturating_mul(MIB)));
    match name.parse() {
        Ok(vm) => {
            let tiers = PerTier {
                fast: bytes(tiers.fast_mib),
                slow: bytes(tiers.slow_mib),
            };
            change(&handle, peer, |answer| Change::SetTiers {
                vm,
                tiers,
                answer,
            })
            .await
        }
        Err(error) => problem(StatusCode::BAD_REQUEST, error),
    }
}

async fn forgive(
    State(handle): State<Handle>,
    Extension(peer): Extension<Peer>,
    Path(name): Path<String>,
) -> Response {
    match name.parse() {
        Ok(vm) => change(&handle, peer, |answer| Change::Forgive { vm, answer }).await,
        Err(error) => problem(StatusCode::BAD_REQUEST, error),
    }
}

async fn set_policy(
    State(handle): State<Handle>,
    Extension(peer): Extension<Peer>,
    choice: Result<Json<PolicyChoice>, JsonRejection>,
) -> Response {
    match choice {
        Ok(Json(PolicyChoice { policy })) => set_policy_to(&handle, peer, Some(policy)).await,
        Err(rejected) => rejected_body(&rejected),
    }
}

async fn reset_policy(State(handle): State<Handle>, Extension(peer): Extension<Peer>) -> Response {
    set_policy_to(&handle, peer, None).await
}

async fn set_policy_to(handle: &Handle, peer: Peer, policy: Option<Policy>) -> Response {
    change(handle, peer, |answer| Change::SetPolicy { policy, answer }).await
}

async fn add(
    State(handle): State<Handle>,
    Extension(peer): Extension<Peer>,
    Path(name): Path<String>,
    section: Result<Json<serde_json::Value>, JsonRejection>,
) -> Response {
    let section = match section {
        Ok(Json(section)) => section,
        Err(rejected) => return rejected_body(&rejected),
    };
    let config = handle.config.borrow().clone();
    match config.defaults.complete(section) {
        Ok(vm) => ask_for(&handle, peer, &name, Asked::Add(Box::new(vm)), false).await,
        Err(error) => problem(
            StatusCode::UNPROCESSABLE_ENTITY,
            format!("VM {name}: {error}; send a section [vm.NAME] of host.toml as JSON"),
        ),
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Removal {
    /// Whether the VM may be running.
    #[serde(default)]
    running: bool,
}

async fn remove(
    State(handle): State<Handle>,
    Extension(peer): Extension<Peer>,
    Path(name): Path<String>,
    removal: Result<Query<Removal>, QueryRejection>,
) -> Response {
    match removal {
        Ok(Query(Removal { running })) => {
            ask_for(&handle, peer, &name, Asked::Remove, running).await
        }
        Err(rejected) => rejected_query(&rejected),
    }
}

async fn set(
    State(handle): State<Handle>,
    Extension(peer): Extension<Peer>,
    Path(name): Path<String>,
    change: Result<Json<VmChange>, JsonRejection>,
) -> Response {
    match change {
        Ok(Json(change)) if change.is_empty() => {
            let error =
                "set share, slowdown_max_percent, pool, fast or slow (guarantee_mib, limit_mib)";
            problem(StatusCode::BAD_REQUEST, error)
        }
        Ok(Json(change)) => ask_for(&handle, peer, &name, Asked::Change(change), false).await,
        Err(rejected) => rejected_body(&rejected),
    }
}

async fn reset(
    State(handle): State<Handle>,
    Extension(peer): Extension<Peer>,
    Path(name): Path<String>,
) -> Response {
    ask_for(&handle, peer, &name, Asked::Reset, false).await
}

async fn ask_for(handle: &Handle, peer: Peer, name: &str, asked: Asked, may_run: bool) -> Response {
    match name.parse() {
        Ok(vm) => {
            change(handle, peer, |answer| Change::Setting {
                vm,
                asked,
                may_run,
                answer,
            })
            .await
        }
        Err(error) => problem(StatusCode::BAD_REQUEST, error),
    }
}

async fn config(State(handle): State<Handle>) -> Response {
    let config = handle.config.borrow().clone();
    Json(&*config).into_response()
}

async fn evacuate(State(handle): State<Handle>, Extension(peer): Extension<Peer>) -> Response {
    change(&handle, peer, |answer| Change::Evacuate { answer }).await
}

async fn reload(State(handle): State<Handle>, Extension(peer): Extension<Peer>) -> Response {
    let (answer, answered) = oneshot::channel();
    let answer = match handle.changes.send((peer, Change::Reload { answer })).await {
        Ok(()) => answered.await.ok(),
        Err(_) => None,
    };
    match answer {
        Some(Ok(changes)) => Json(changes).into_response(),
        refused => said(refused.map(|answer| answer.map(drop))),
    }
}

/// Sends a change and answers with the controller's result.
async fn change(
    handle: &Handle,
    peer: Peer,
    make: impl FnOnce(oneshot::Sender<Result<(), ChangeError>>) -> Change,
) -> Response {
    let (answer, answered) = oneshot::channel();
    let answer = match handle.changes.send((peer, make(answer))).await {
        Ok(()) => answered.await.ok(),
        Err(_) => None,
    };
    said(answer)
}

/// The response to the controller's answer; `None` if it gave none.
fn said(answer: Option<Result<(), ChangeError>>) -> Response {
    match answer {
        Some(Ok(())) => StatusCode::NO_CONTENT.into_response(),
        Some(Err(refusal)) => {
            let status = match refusal {
                ChangeError::NoVm(_) => StatusCode::NOT_FOUND,
                ChangeError::Conflict(_) => StatusCode::CONFLICT,
                ChangeError::State(_) => StatusCode::INTERNAL_SERVER_ERROR,
            };
            problem(status, refusal)
        }
        None => problem(
            StatusCode::SERVICE_UNAVAILABLE,
            "the host controller is stopping",
        ),
    }
}

fn rejected_body(rejected: &JsonRejection) -> Response {
    problem(rejected.status(), rejected.body_text())
}

fn rejected_query(rejected: &QueryRejection) -> Response {
    problem(rejected.status(), rejected.body_text())
}

fn problem(status: StatusCode, error: impl ToString) -> Response {
    let error = error.to_string();
    (status, Json(Problem { error })).into_response()
}

#[cfg(test)]
pub(crate) mod tests;
