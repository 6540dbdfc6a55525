//! Services of a document: in the maps, listed, explained, and left alone by a restart.

use flowloom_api::v1::ErrorCode;

use super::{DOCUMENT, Node};

const BALANCER: &str = "
load_balancers:
  - name: web
    vpc: red
    vip: 10.96.0.1
    ports:
      - {port: 80, backends: [{ip: 10.0.0.3, port: 8080}, {ip: 10.0.0.4, port: 8080, healthy: false}]}
";

#[test]
fn a_load_balancer_is_in_the_maps_and_its_backends_are_explained() {
    let node = Node::new(Some(&format!("{DOCUMENT}{BALANCER}")));
    let mut core = node.agent();
    let state = node.state().services;
    // The port, and the rest of the address.
    assert_eq!((state.services.len(), state.backends.len(), state.members.len()), (2, 1, 1));

    let list = core.service_list(Some("red")).services;
    let [web] = list.as_slice() else { panic!("{list:?}") };
    assert_eq!((web.name.as_str(), web.ports[0].backends, web.ports[0].ready), ("web", 2, 1));
    assert_ne!(web.ports[0].number, 0);
    assert!(core.service_list(Some("default")).services.is_empty());

    let explained = core.service_explanation("red", "web").unwrap();
    assert!(explained.here);
    let [front] = explained.frontends.as_slice() else { panic!("{explained:?}") };
    assert_eq!((front.kind.as_str(), front.scope.as_str(), front.port), ("cluster-ip", "inside", 80));
    let why: Vec<_> =
        front.backends.iter().map(|b| (b.endpoint.as_deref(), b.used, b.reason.as_str())).collect();
    assert_eq!(why, [(Some("b"), true, "ready"), (Some("c"), false, "not-ready")]);
    assert_eq!(core.service("red", "none").unwrap_err().code, ErrorCode::NotFound);

    drop(core);
    let before = node.writes();
    let core = node.agent();
    assert_eq!(node.writes(), before, "a restart wrote services anew");
    drop(core);
    node.write(DOCUMENT);
    let _core = node.agent();
    assert_eq!(node.state().services, Default::default());
}
