# The sdist lacks the script that writes build-info.cpp. Without git, which knows no commit here
# either, the commit stands below: it is the one whose files the archive holds.
include(${CMAKE_CURRENT_SOURCE_DIR}/cmake/build-info.cmake)
set(BUILD_COMMIT "55d3c05b")
configure_file(
    "${CMAKE_CURRENT_SOURCE_DIR}/common/build-info.cpp.in"
    "${CMAKE_CURRENT_SOURCE_DIR}/common/build-info.cpp")
