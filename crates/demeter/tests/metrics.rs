//! Tests that documentation, rules and dashboard name the metrics that agent and controller export.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use demeter_guest::status::{StatusCell, TargetStatus};
use demeter_host::metrics;
use demeter_host::view::{HostView, PlaceView, PlacesView, PoolView, TierView, VmView};

const PAGE: &str = "docs/src/reference/metrics.md";
const RULES: &str = "packaging/prometheus/demeter.rules.yml";
const RULES_TEST: &str = "packaging/prometheus/demeter.test.yml";
const DASHBOARD: &str = "packaging/grafana/demeter.json";

/// Prometheus needs seconds to start, or more on a busy machine.
const SCRAPE_LIMIT: Duration = Duration::from_secs(120);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The metrics of an agent that has a value for each.
fn guest() -> String {
    let cell = StatusCell::default();
    cell.update(|s| {
        s.fast_hit_permille = Some(500);
        s.failed_bytes.insert("EBUSY".into(), 1);
        s.targets.push(TargetStatus::default());
    });
    cell.prometheus()
}

/// The metrics of a controller that has a value for each.
fn host() -> String {
    let vm = VmView {
        owned: Some(TierView::default()),
        fast_hit: Some(0.5),
        relocation: Some(Default::default()),
        service: Some(Default::default()),
        benefit: serde_json::from_str(
            "{\"points\": [[0, 0]], \"fast_latency_ns\": 1, \"slow_latency_ns\": 2, \"running_ms\": 1, \
             \"waits_min_permille\": 0, \"waits_max_permille\": 0}",
        )
        .unwrap(),
        pressure: Some(0.5),
        places: Some(PlacesView {
            fast: vec![PlaceView { node: 0, bytes: 1 }],
            slow: vec![],
            elsewhere: Some(TierView::default()),
        }),
        ..VmView::default()
    };
    let pool = PoolView {
        name: "socket0".into(),
        ..PoolView::default()
    };
    metrics::text(Arc::new(HostView {
        vms: vec![vm],
        pools: vec![pool],
        ..HostView::default()
    }))
}

#[derive(Default)]
struct Metric {
    kind: String,
    unit: String,
    help: String,
    labels: BTreeSet<String>,
}

/// Parses Prometheus' text format to metrics by their names in queries.
fn parse(text: &str) -> BTreeMap<String, Metric> {
    let mut families: BTreeMap<String, Metric> = BTreeMap::new();
    let mut found = BTreeMap::new();
    for line in text.lines() {
        if let Some(told) = line.strip_prefix("# ") {
            let mut words = told.splitn(3, ' ');
            let (Some(what), Some(name), Some(rest)) = (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let family = families.entry(name.into()).or_default();
            match what {
                "HELP" => family.help = rest.trim_end_matches('.').into(),
                "TYPE" => family.kind = rest.into(),
                "UNIT" => family.unit = rest.into(),
                other => panic!("{other}"),
            }
            continue;
        }
        let end = line.find(['{', ' ']).unwrap();
        let name = &line[..end];
        let plain = name.strip_suffix("_total").or(name.strip_suffix("_info"));
        let family = plain.unwrap_or(name);
        let metric = families.get(family).unwrap_or_else(|| panic!("{line}"));
        let labels = line[end..].strip_prefix('{').into_iter();
        let labels = labels.flat_map(|text| text.split('}').next().unwrap().split(','));
        let labels = labels.map(|label| label.split('=').next().unwrap().to_owned());
        found.entry(name.to_owned()).or_insert_with(|| Metric {
            kind: metric.kind.clone(),
            unit: metric.unit.clone(),
            help: metric.help.clone(),
            labels: labels.collect(),
        });
    }
    for name in families.keys() {
        let is_sampled = ["", "_total", "_info"]
            .iter()
            .any(|end| found.contains_key(&format!("{name}{end}")));
        assert!(is_sampled, "{name} has no sample here: give it one");
    }
    found
}

/// All metrics of both, by name.
fn all() -> BTreeMap<String, Metric> {
    let mut all = parse(&guest());
    all.extend(parse(&host()));
    assert!(all.len() > 20);
    all
}

fn page() -> String {
    let mut page = "# Metrics\n\nMade by `cargo xtask docs` from what the programs print; nothing here is \
                    written by hand. How to have them scraped: [Monitoring](../monitoring.md). Counters \
                    count from the program's start.\n"
        .to_owned();
    for (title, text) in [
        ("The agent (`demeter guest`)", guest()),
        ("The controller (`demeter host`)", host()),
    ] {
        page += &format!(
            "\n## {title}\n\n| name | type | unit | labels | meaning |\n|---|---|---|---|---|\n"
        );
        for (name, metric) in parse(&text) {
            let unit = match &*metric.unit {
                "" if name.ends_with("_ratio") => "0 to 1",
                unit => unit,
            };
            let labels: Vec<_> = metric.labels.iter().map(|l| format!("`{l}`")).collect();
            page += &format!(
                "| `{name}` | {} | {unit} | {} | {} |\n",
                metric.kind,
                labels.join(", "),
                metric.help
            );
        }
    }
    page
}

#[test]
fn the_page_has_the_metrics_that_are_printed() {
    let page = page();
    if std::env::var_os("DEMETER_WRITE_DOCS").is_some() {
        fs::write(root().join(PAGE), &page).unwrap();
    }
    assert!(
        read(PAGE) == page,
        "{PAGE} is out of date: run `cargo xtask docs`"
    );
}

/// Names of our metrics in a text.
fn named(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let ours =
        |word: &&str| word.starts_with("demeter_guest_") || word.starts_with("demeter_host_");
    words.filter(ours).collect()
}

#[test]
fn rules_and_dashboard_name_metrics_that_there_are() {
    let all = all();
    for path in [RULES, RULES_TEST, DASHBOARD, "docs/src/monitoring.md"] {
        let text = read(path);
        let named = named(&text);
        assert!(!named.is_empty(), "{path}");
        for name in named {
            assert!(all.contains_key(name), "{path}: there is no metric {name}");
        }
    }
}

#[test]
fn each_alert_has_a_line_of_advice() {
    let (rules, page) = (read(RULES), read("docs/src/monitoring.md"));
    let alerts = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    let alerts: Vec<_> = alerts.collect();
    assert!(alerts.len() > 10);
    for alert in alerts {
        assert!(page.contains(&format!("| {alert} | ")), "{alert}");
    }
}

/// An alert's tests end with the next alert's name, or with the next series.
#[test]
fn each_alert_has_a_test_in_which_it_fires() {
    let (rules, tests) = (read(RULES), read(RULES_TEST));
    let fires = |name: &str| {
        let of = tests.split("alertname: ").skip(1);
        let mut of = of.filter(|test| test.lines().next() == Some(name));
        of.any(|test| test.contains("exp_alerts:"))
    };
    let alerts = rules.lines();
    for alert in alerts.filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        assert!(fires(alert), "{alert} has no test in which it fires");
    }
}

#[test]
fn the_dashboard_is_one() {
    let dashboard: serde_json::Value = serde_json::from_str(&read(DASHBOARD)).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut ids = BTreeSet::new();
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
        if panel["type"] == "row" {
            continue;
        }
        for target in panel["targets"].as_array().unwrap() {
            let expr = target["expr"].as_str().unwrap();
            assert!(!named(expr).is_empty(), "{expr}");
        }
    }
    assert!(panels.len() > 5);
}

/// The dashboard's queries as rules, with values for Grafana's variables.
fn asked_by_the_dashboard() -> String {
    let dashboard: serde_json::Value = serde_json::from_str(&read(DASHBOARD)).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array());
    let rules: Vec<_> = targets
        .flatten()
        .map(|target| {
            let expr = target["expr"].as_str().unwrap();
            let expr = expr.replace("$__rate_interval", "1m").replace('$', "");
            serde_json::json!({ "record": format!("asked:{}", target["refId"].as_str().unwrap()),
                                "expr": expr, "labels": { "panel": expr } })
        })
        .collect();
    let group = serde_json::json!({ "name": "dashboard", "rules": rules });
    serde_json::json!({ "groups": [group] }).to_string()
}

#[test]
fn promtool_accepts_the_rules_and_they_fire_when_they_should() {
    let promtool = std::env::var_os("PROMTOOL").unwrap_or_else(|| "promtool".into());
    let folder = tempfile::tempdir().unwrap();
    let asked = folder.path().join("asked.json");
    fs::write(&asked, asked_by_the_dashboard()).unwrap();
    for args in [
        ["check", "rules", RULES],
        ["test", "rules", RULES_TEST],
        ["check", "rules", asked.to_str().unwrap()],
    ] {
        let mut command = Command::new(&promtool);
        let Ok(output) = command.args(args).current_dir(root()).output() else {
            eprintln!("skipped: promtool is not installed (apt install prometheus)");
            return;
        };
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(output.status.success(), "{said}");
    }
}

/// A child process that ends with the test.
struct Child(std::process::Child);

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A free loopback address.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

/// Prometheus' answer to a query, or `None` if it cannot be reached.
fn query(prometheus: SocketAddr, query: &str) -> Option<serde_json::Value> {
    let mut stream = TcpStream::connect(prometheus).ok()?;
    let request = format!("GET /api/v1/query?query={query} HTTP/1.0\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (_, body) = answer.split_once("\r\n\r\n")?;
    let body: serde_json::Value = serde_json::from_str(body).ok()?;
    let value = &body["data"]["result"][0]["value"][1];
    (!value.is_null()).then(|| value.clone())
}

#[test]
fn prometheus_scrapes_a_running_controller() {
    let prometheus = std::env::var_os("PROMETHEUS").unwrap_or_else(|| "prometheus".into());
    if Command::new(&prometheus).arg("--version").output().is_err() {
        eprintln!("skipped: prometheus is not installed (apt install prometheus)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("token"), "correct horse battery").unwrap();
    fs::set_permissions(path("token"), fs::Permissions::from_mode(0o600)).unwrap();
    let (controller, server) = (free_address(), free_address());
    // Its VM does not run, which must be exported, too.
    let config = format!(
        "socket = {:?}\nstate = {:?}\nlisten = \"{controller}\"\ntoken_file = {:?}\n\
         pool = {{ fast_mib = 100, slow_mib = 100 }}\n[vm.db]\nqmp = {:?}\nagent = {:?}\n\
         fast = {{ memdev = \"f\", size_mib = 10 }}\nslow = {{ memdev = \"s\", size_mib = 20 }}\n",
        path("host.sock"),
        path("state.json"),
        path("token"),
        path("db.qmp"),
        path("db.agent"),
    );
    fs::write(path("host.toml"), config).unwrap();
    let scrape = format!(
        "global: {{ scrape_interval: 1s }}\nrule_files: [{:?}]\nscrape_configs:\n  - job_name: demeter-host\n    \
         authorization: {{ credentials_file: {:?} }}\n    static_configs: [{{ targets: [\"{controller}\"] }}]\n",
        fs::canonicalize(root().join(RULES)).unwrap(),
        path("token"),
    );
    fs::write(path("prometheus.yml"), scrape).unwrap();
    let start = |command: &mut Command| {
        let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
        Child(quiet.spawn().unwrap())
    };
    let _controller = start(
        Command::new(env!("CARGO_BIN_EXE_demeter"))
            .args(["host", "--config"])
            .arg(path("host.toml")),
    );
    let _server = start(
        Command::new(&prometheus)
            .arg(format!(
                "--config.file={}",
                path("prometheus.yml").display()
            ))
            .arg(format!("--storage.tsdb.path={}", path("data").display()))
            .arg(format!("--web.listen-address={server}")),
    );
    let begin = Instant::now();
    let pool = loop {
        if let Some(value) = query(server, "demeter_host_pool_bytes%7Btier%3D%22fast%22%7D") {
            break value;
        }
        assert!(begin.elapsed() < SCRAPE_LIMIT, "nothing was scraped");
        std::thread::sleep(Duration::from_millis(200));
    };
    assert_eq!(pool, (100u64 << 20).to_string());
    assert_eq!(
        query(server, "demeter_host_vm_up%7Bvm%3D%22db%22%7D").unwrap(),
        "0"
    );
    assert_eq!(query(server, "up").unwrap(), "1");
}
